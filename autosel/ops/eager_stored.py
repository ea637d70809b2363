"""Ops on weights or a cache in a format, as eager PyTorch: the baseline, as fast as eager can be (others: eager.py).

This is a separate module, so that changes here do not change the code of functions in eager.py, by which stored
decisions name them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from autosel.ops.eager import ACTIVATION, _attend, _mask, rmsnorm

MOST_PACKED = 64  # rows of x

if TYPE_CHECKING:
    from autosel.ops.cached import Cached
    from autosel.ops.weight import Weight


def product(x: Tensor, w: Weight, out: Tensor | None = None) -> Tensor:
    """Return x @ w^T. A row's scale is applied to the codes' product, which is small.

    fp16 cannot hold that product: 448 times a thousand activations is above its range.
    """
    if w.format.group or w.zeros is not None:
        made = F.linear(x, w.dequantised(x.dtype))
        return made if out is None else out.copy_(made)
    if _packs(x, w):
        made = torch._weight_int8pack_mm(x, w.codes, w.scales.to(x.dtype))
        return made if out is None else out.copy_(made)
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    made = F.linear(x.to(wide), w.codes.to(wide))
    return (made * w.scales).to(x.dtype) if out is None else torch.mul(made, w.scales, out=out)


def _packs(x: Tensor, w: Weight) -> bool:
    """Return True if PyTorch has a product with int8 codes for these operands.

    On two cores of Zen 4 it takes a twentieth of the time of widening the weights at M = 1, and more time from M = 64
    on. It needs whole vectors at addresses that are multiples of their size: with K = 37, or x two bytes off, PyTorch
    2.13 ends the process.
    """
    return (
        w.codes.dtype == torch.int8
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[0] <= MOST_PACKED
        and all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in (x, w.codes))
        and w.shape[0] % 32 == 0
        and w.shape[1] % 64 == 0
    )


def linear(x: Tensor, w: Weight, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    y = product(x, w, y)
    for extra in (bias, residual):
        if extra is not None:
            y.add_(extra)
    return y


def norm_qkv(x: Tensor, norm_weight: Tensor, w: Weight, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    return product(rmsnorm(x, norm_weight, eps, offset), w, y)


def gate_up(
    x: Tensor,
    norm_weight: Tensor,
    w_gate: Weight,
    w_up: Weight,
    eps: float,
    offset: float,
    activation: int,
    y: Tensor | None = None,
) -> Tensor:
    h = rmsnorm(x, norm_weight, eps, offset)
    return torch.mul(ACTIVATION[activation](product(h, w_gate)), product(h, w_up), out=y)


def lm_head(x: Tensor, w: Weight, greedy: int, out: Tensor | None = None) -> Tensor:
    if not greedy:
        return product(x, w, out)
    return torch.argmax(product(x, w), dim=-1, out=out)


def attn(
    q: Tensor,
    k: Cached,
    v: Cached,
    lengths: Tensor | None,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
    o: Tensor | None = None,
) -> Tensor:
    """Attend to the unpacked codes, which are exact. K's scale is applied to the query, V's to the result: both are
    small.
    """
    s, group = q.shape[2], q.shape[1] // k.shape[1]
    first = max(0, max_len - s - window + 1) if window and lengths is None else 0
    keys, values = (cache.codes[:, :, first:max_len].to(q.dtype) for cache in (k, v))
    by_k, by_v = (cache.scales.repeat_interleave(group)[:, None, None] for cache in (k, v))
    made = _attend((q * by_k).to(q.dtype), keys, values, _mask(s, keys, lengths, window), scale, softcap)
    return (made * by_v).to(q.dtype) if o is None else torch.mul(made, by_v, out=o)
