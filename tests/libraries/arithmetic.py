"""What the stand-ins of this folder compute with: PyTorch in fp32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def straight(*operands: Tensor) -> None:
    """Refuses what a load of 16 bytes would fault on."""
    for t in operands:
        vector = min(16, t.shape[-1] * t.element_size() & -(t.shape[-1] * t.element_size()))
        assert t.stride(-1) == 1 or t.shape[-1] == 1, "the last dimension has gaps"
        assert t.data_ptr() % 16 == 0, "misaligned address"
        steps = [s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
        assert all(s * t.element_size() % vector == 0 for s in steps), "a row begins between two vectors"


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
