"""Replace quack-kernels 0.6.5: its signatures and refusals; PyTorch's arithmetic."""

from __future__ import annotations

import torch
from arithmetic import normalised, straight
from torch import Tensor


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm is of the sum in fp32, before that is stored."""
    assert weight is not None and bias is None
    straight(x, weight)
    if residual is None:
        return normalised(x, weight, eps, weight_offset)
    straight(residual)
    summed = x.float() + residual.float()
    y = normalised(summed, weight, eps, weight_offset).to(x.dtype)
    return (y, summed.to(residual.dtype)) if prenorm else y
