"""Ops on weights in a format, as eager PyTorch: the baseline, as fast as eager sensibly goes (eager.py has the rest).

A module of its own, because a stored decision names a function of eager.py by its code: what is here changes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from autosel.ops.eager import ACTIVATION, rmsnorm

if TYPE_CHECKING:
    from autosel.ops.weight import Weight


def product(x: Tensor, w: Weight, out: Tensor | None = None) -> Tensor:
    """x @ w^T. A scale that a whole row shares is applied to the little that the codes give; fp16 does not hold that
    product: 448 times a thousand activations is above its range."""
    if w.format.group or w.zeros is not None:
        made = F.linear(x, w.dequantised(x.dtype))
        return made if out is None else out.copy_(made)
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    made = F.linear(x.to(wide), w.codes.to(wide))
    return (made * w.scales).to(x.dtype) if out is None else torch.mul(made, w.scales, out=out)


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
