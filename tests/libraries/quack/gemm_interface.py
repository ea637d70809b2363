"""Its products: a matrix that is a view of another's transpose is as good."""

from __future__ import annotations

from typing import Any

import torch
from arithmetic import straight
from torch import Tensor


def gemm(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    *,
    tuned: bool = True,
    **unused: Any,
) -> Tensor:
    return _product(A, B, None, out, bias, tuned, unused)


def gemm_add(
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    tuned: bool = True,
    **unused: Any,
) -> Tensor:
    return _product(A, B, C, out, bias, tuned, unused)


def _product(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None, bias: Tensor | None, tuned: bool, unused: Any
) -> Tensor:
    assert not tuned and not unused and a.shape[1] == b.shape[0]
    straight(a, b.t())
    made = a.float() @ b.float()
    for extra in (c, bias):
        made = made if extra is None else made + extra.float()
    return made.to(a.dtype) if out is None else out.copy_(made.to(a.dtype))
