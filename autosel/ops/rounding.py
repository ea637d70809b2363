"""The roundings that a contract allows, propagated: dot products, stored values, flushed subnormals.

One formula per source of error (research: probabilistic rounding analysis, Ipsen & Zhou, arXiv 1906.10465): a sum of K
fp32 terms has an error of about sqrt(K) * u32 * sum|terms| in any order. LAMBDA = 4 makes that a bound that no correct
order exceeds in practice; the deterministic bound K * u32 would not detect a dropped term.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autosel.ops.dtypes import DTYPE_NAME, TINY_NORMAL, TINY_SUBNORMAL, U32, UNIT

LAMBDA = 4.0


def flushable(x: Tensor) -> Tensor:
    """Return |x| in float64 where x is subnormal in its own dtype, 0 elsewhere: the cost of counting subnormals as
    zero.

    A float64 x is an intermediate that is never stored, so nothing of it is flushed.
    """
    if x.dtype == torch.float64:
        return torch.zeros_like(x)
    magnitude = x.double().abs()
    return torch.where(magnitude < TINY_NORMAL[DTYPE_NAME[x.dtype]], magnitude, 0.0)


def matmul_error(x: Tensor, w: Tensor) -> Tensor:
    """Return a bound on x[.., M, K] @ w[.., N, K]^T, summed in fp32 in any order, before it is stored; float64 [.., M,
    N].

    Operands have their own dtype, in which their subnormals may have been flushed.
    """
    k = x.shape[-1]
    x_abs, w_abs = x.abs().double(), w.abs().double().mT
    error = LAMBDA * math.sqrt(k) * U32 * (x_abs @ w_abs) + 2 * k * TINY_NORMAL["fp32"]
    if _any_small(x):
        error = error + flushable(x) @ w_abs
    if _any_small(w):
        error = error + x_abs @ flushable(w).mT
    return error


def _any_small(x: Tensor) -> bool:
    """Return True if `flushable` may be nonzero. The check in the weights' own dtype costs a quarter."""
    return x.dtype != torch.float64 and bool((x.abs() < TINY_NORMAL[DTYPE_NAME[x.dtype]]).any())


def stored(y: Tensor, error: Tensor, dtype: str) -> Tensor:
    """Return a bound on a value with error `error` after it is stored in `dtype`."""
    rounded = error + UNIT[dtype] * (y.abs() + error)
    may_flush = y.abs() - error < TINY_NORMAL[dtype]
    return rounded + torch.where(may_flush, TINY_NORMAL[dtype], TINY_SUBNORMAL[dtype])
