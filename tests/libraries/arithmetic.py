"""Compute for the stand-ins in this folder: PyTorch in fp32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def straight(*operands: Tensor) -> None:
    """Refuse operands on which a load of 16 bytes would fault."""
    for t in operands:
        vector = min(16, t.shape[-1] * t.element_size() & -(t.shape[-1] * t.element_size()))
        assert t.stride(-1) == 1 or t.shape[-1] == 1, "the last dimension has gaps"
        assert t.data_ptr() % 16 == 0, "misaligned address"
        steps = [s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
        assert all(s * t.element_size() % vector == 0 for s in steps), "a row is not aligned to vectors"


def normalised(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * (weight.float() + offset)).to(x.dtype)


def rotated_by_table(x: Tensor, table: Tensor, halves: bool) -> Tensor:
    """x[M,H,D] by table[M, cos R/2 | sin R/2]."""
    cos, sin = (t[:, None] for t in table.chunk(2, -1))
    width = table.shape[-1]
    turning, rest = x[..., :width].float(), x[..., width:]
    a, b = turning.chunk(2, -1) if halves else (turning[..., ::2], turning[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    made = torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)
    return torch.cat((made.to(x.dtype), rest), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window_left: int, softcap: float) -> Tensor:
    """q[Hq,D] over k, v [keys,Hkv,D]; `window_left` keys before the last one, -1: all."""
    group = q.shape[0] // k.shape[1]
    first = max(0, len(k) - 1 - window_left) if window_left >= 0 else 0
    keys, values = (t[first:].float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("hd,khd->hk", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(q.dtype)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | int | None,
    table: Tensor | None,
    scale: float | None,
    window_left: int,
    softcap: float,
) -> Tensor:
    """q[B,S,Hq,D], the last S of each sequence's `lengths` positions, over k, v [B,L,Hkv,D], or [P,page,Hkv,D] and the
    table that finds them. Nothing to see gives zeros."""
    straight(q, k, v)
    made = torch.zeros(q.shape, dtype=q.dtype)
    counts = [lengths] * len(q) if isinstance(lengths, int) else lengths.tolist() if lengths is not None else []
    for b, count in enumerate(counts):
        keys, values = (t[b] if table is None else t[table[b, : -(-count // t.shape[1])].long()].flatten(0, 1)
                        for t in (k, v))  # fmt: skip
        for s in range(q.shape[1]):
            seen = count - q.shape[1] + s + 1
            if seen > 0:
                made[b, s] = attention(
                    q[b, s], keys[:seen], values[:seen], scale or q.shape[-1] ** -0.5, window_left, softcap
                )
    return made
