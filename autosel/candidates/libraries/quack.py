"""quack-kernels: CuTe kernels compiled at first use, for Hopper and later (signatures: 0.6.5).

Its products use the configuration of its heuristic (`tuned=False`): its own tuning at each new shape would be a race
within the race.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import (
    Library,
    LibraryKernel,
    Limits,
    aligned,
    handed,
    parsed,
    plain_norm,
    room,
    spelled,
    sum_then_norm,
)
from autosel.values import DTypeName, Workload

if TYPE_CHECKING:
    from torch import Tensor

QUACK = Library(
    distribution="quack-kernels", module="quack", least_version=(0, 3, 0), least_cc=(9, 0), compiles_s=200.0
)
PRODUCTS = replace(QUACK, module="quack.gemm_interface", least_version=(0, 6, 5), needs=("gemm", "gemm_add"))
WITH_OFFSET = (0, 6, 5)  # earlier versions are assumed to have only Llama's norm
VECTOR = 8  # elements: strides are multiples of it


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from quack import rmsnorm as norm  # type: ignore[import-not-found,unused-ignore]

    extra = {"weight_offset": offset} if offset else {}
    made: Tensor = norm(aligned(x), aligned(weight), eps=eps, **extra)
    return made


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, sandwich: int
) -> tuple[Tensor, Tensor]:
    """Call the norm with `prenorm`, which also returns the sum."""
    from quack import rmsnorm as norm  # type: ignore[import-not-found,unused-ignore]

    assert not sandwich, "it adds, then normalises"
    extra = {"weight_offset": offset} if offset else {}
    y, summed = norm(aligned(x), aligned(weight), residual=aligned(residual), eps=eps, prenorm=True, **extra)
    return y, summed


def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    """Call A[M,K] @ B[K,N] with B a transposed view of the weights, without a copy."""
    from quack.gemm_interface import gemm, gemm_add  # type: ignore[import-not-found,unused-ignore]

    a, b, out = aligned(x), aligned(w).t(), room(y, x, x.shape[0], w.shape[0])
    offset = None if bias is None else aligned(bias)
    if residual is None:
        return handed(gemm(a, b, out=out, bias=offset, tuned=False), y)
    return handed(gemm_add(a, b, aligned(residual), out=out, bias=offset, tuned=False), y)


def _norm(w: Workload, cc: tuple[int, int]) -> str:
    old = parsed(QUACK.version()) < WITH_OFFSET
    return f"before {spelled(WITH_OFFSET)} {plain_norm(w, cc)}" if old and w.trait("offset", 0.0) else ""


def _sum(w: Workload, cc: tuple[int, int]) -> str:
    return sum_then_norm(w, cc) or _norm(w, cc)


def _vectors(w: Workload, _: tuple[int, int]) -> str:
    whole = w["N"] % VECTOR == 0 and w["K"] % VECTOR == 0
    return "" if whole else f"supports N and K in steps of {VECTOR}; here {w['N']} and {w['K']}"


def _kernel(
    op: str, limits: Limits, dtypes: tuple[DTypeName, ...], library: Library = QUACK, *, writes_out: bool = False
) -> LibraryKernel:
    return LibraryKernel(
        op, f"quack:{op}", library, backend="QUACK", limits=limits, dtypes=dtypes, writes_out=writes_out
    )


KERNELS = (
    _kernel("rmsnorm", _norm, ("bf16", "fp16", "fp32")),
    _kernel("add_rmsnorm", _sum, ("bf16", "fp16", "fp32")),
    _kernel("linear", _vectors, ("bf16", "fp16"), PRODUCTS, writes_out=True),
)
