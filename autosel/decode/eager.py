"""The baseline: the decoder as Hugging Face writes it, in plain PyTorch with SDPA, on the same weights and cache.

docs/decode.md compares it with the model classes themselves. In another precision, the same code gives the reference
for both arms (reference.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from autosel.decode.cache import Cache
from autosel.decode.rope import frequencies
from autosel.decode.weights import Layer, Weights
from autosel.models.passes import CHUNK, rows_at_once
from autosel.models.shape import ModelShape
from autosel.ops.eager import sdpa
from autosel.ops.eager_stored import product
from autosel.ops.weight import Matrix, split

Made = TypeVar("Made", bound=tuple[Tensor, ...])

ACTIVATION: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Eager:
    """One decoder. Sequences of a batch have equal length; tokens [B, S] follow `held` others."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.shape = weights, weights.shape
        self.layers = weights.layers
        self.inv_freq = frequencies(weights.shape, weights.device)

    def logits(self, tokens: Tensor, cache: Cache, held: int) -> Tensor:
        """Return [B, V] after the last token, and append keys and values."""
        return self.times(self.hidden(tokens, cache, held, last=True)[:, -1], self.weights.head)

    def prefill(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the logits of whole prompts into an empty cache, some rows at a time."""
        rows = rows_at_once(tokens.shape[1])
        starts = range(0, len(tokens), rows)
        return torch.cat([self.logits(tokens[b : b + rows], cache.part(b, b + rows), 0) for b in starts])

    def hidden(self, tokens: Tensor, cache: Cache, held: int, *, last: bool = False) -> Tensor:
        """Return [B, S, d], normalised for the output head; with `last` only of the last token."""
        s = self.shape
        x = self._wide(self.weights.look_up("embedding", tokens))
        if s.embedding_scale != 1.0:
            x = x * torch.tensor(s.embedding_scale, dtype=x.dtype)
        turns = self._turns(held, tokens.shape[1], x.dtype)
        for i, layer in enumerate(self.layers):
            (x,) = _by_parts(partial(self._after, layer), x, self._attention(i, layer, x, turns, cache, held))
        return self._norm(x[:, -1:] if last else x, self.weights.norm)

    def _after(self, layer: Layer, x: Tensor, o: Tensor) -> tuple[Tensor]:
        """Return the residual stream after a layer, from its input and the layer's attention."""
        h = self.times(o, layer.o)
        x = x + (h if layer.attn_post_norm is None else self._norm(h, layer.attn_post_norm))
        h = self._norm(x, layer.mlp_norm)
        gated = ACTIVATION[self.shape.activation](self.times(h, layer.gate))
        h = self.times(gated * self.times(h, layer.up), layer.down)
        return (x + (h if layer.mlp_post_norm is None else self._norm(h, layer.mlp_post_norm)),)

    def times(self, x: Tensor, w: Matrix) -> Tensor:
        """Return x @ w^T. A weight in a format uses PyTorch's code for it."""
        if isinstance(w, Tensor):
            return F.linear(x, w)
        made: Tensor = product(x.flatten(0, -2), w).unflatten(0, x.shape[:-1])
        return made

    def _wide(self, t: Tensor) -> Tensor:
        """Return a tensor of the model as it enters the arithmetic."""
        return t

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise. Llama stores the normalised value before it multiplies by the weight; Gemma multiplies first."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.rms_eps)
        if self.shape.norm_offset:
            return (wide * (self.shape.norm_offset + weight.to(dtype))).to(x.dtype)
        return self._wide(weight) * wide.to(x.dtype)

    # --- attention ---------------------------------------------------------------------------------------------------

    def _turns(self, held: int, s: int, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor]]:
        """Return cos and sin [S, D] by the id of their frequencies."""
        found = {}
        for inv_freq in self.inv_freq:
            if id(inv_freq) not in found:
                wide = torch.promote_types(dtype, torch.float32)
                position = torch.arange(held, held + s, dtype=wide, device=inv_freq.device)
                angle = position[:, None] * inv_freq.to(wide)
                angle = torch.cat((angle, angle), -1)
                found[id(inv_freq)] = angle.cos().to(dtype), angle.sin().to(dtype)
        return found

    def _attention(
        self, i: int, layer: Layer, x: Tensor, turns: dict[int, tuple[Tensor, Tensor]], cache: Cache, held: int
    ) -> Tensor:
        s, (b, n, _) = self.shape, x.shape
        q, k, v = _by_parts(partial(self._projected, layer), x, *turns[id(self.inv_freq[i])])
        window = s.window if s.layer_types[i] == "sliding" else 0
        k, v = self._past(cache, i, k, v, held, max(0, held + 1 - window) if window else 0)
        mask = _mask(n, k.shape[2], window, x.device) if n > 1 and (held or (window and k.shape[2] > window)) else None
        o = sdpa(q, k, v, mask=mask, causal=n > 1 and mask is None, scale=s.attn_scale)
        return o.transpose(1, 2).reshape(b, n, -1)

    def _projected(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, heads, S, D], rotated."""
        s, (b, n, _), h = self.shape, x.shape, self._norm(x, layer.attn_norm)
        parts = split(layer.qkv, (s.Hq * s.D, s.Hkv * s.D, s.Hkv * s.D))
        q, k, v = (self.times(h, w).view(b, n, -1, s.D) for w in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return _rotate(q, cos, sin, s), _rotate(k, cos, sin, s), v

    def _past(self, cache: Cache, i: int, k: Tensor, v: Tensor, held: int, first: int) -> tuple[Tensor, Tensor]:
        """Return keys and values from `first` on, the new ones last."""
        end = held + k.shape[2]
        cache.k[i][:, :, held:end] = k
        cache.v[i][:, :, held:end] = v
        return cache.k[i][:, :, first:end], cache.v[i][:, :, first:end]


def _by_parts(make: Callable[..., Made], x: Tensor, *more: Tensor) -> Made:
    """Apply `make` to x [B, S, d] and the other operands of its positions [..., S, n], CHUNK tokens at a time.

    Results have the positions in the same dimension. Tokens are independent, so the parts do not change the result.
    """
    width = max(1, CHUNK // len(x))
    if x.shape[1] <= width:
        return make(x, *more)
    parts = [make(*part) for part in zip(*(t.split(width, -2) for t in (x, *more)), strict=True)]
    return tuple(torch.cat(made, -2) for made in zip(*parts, strict=True))  # type: ignore[return-value]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, shape: ModelShape) -> Tensor:
    r = shape.rope.rotary_dim
    turning, rest = x[..., :r], x[..., r:]
    if shape.rope.style:
        cos, sin = (t[..., : r // 2].repeat_interleave(2, -1) for t in (cos, sin))
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        across = torch.cat((-turning[..., r // 2 :], turning[..., : r // 2]), -1)
    turned = turning * cos + across * sin
    return turned if r == x.shape[-1] else torch.cat((turned, rest), -1)


def _mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return bool [1, 1, S, keys]: True where query i, of the last S positions, sees key j."""
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    seen = key <= last
    return (seen & (key > last - window) if window else seen)[None, None]
