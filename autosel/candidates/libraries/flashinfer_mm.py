"""flashinfer-python's bf16 matrix products: each of its routes is a candidate; the fastest depends on the shape.

Signature: 0.7.2.post1, `mm_bf16(a, b, bias, pdl, out, out_dtype, backend)`, with b [K, N] stored by columns, as plain
weights are. cublaslt, tinygemm, cutile and cute-dsl do not exist in 0.6.9. The limits follow the library's own checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autosel.candidates.libraries.base import LibraryKernel, Limits, aligned, handed, room, spelled
from autosel.candidates.libraries.flashinfer import FLASHINFER
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

Ccs = frozenset[tuple[int, int]]
DATACENTRE_BLACKWELL: Ccs = frozenset({(10, 0), (10, 3), (10, 7)})
HOPPER_ON: Ccs = frozenset({(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)})
AMPERE_ON: Ccs = frozenset({*HOPPER_ON, (8, 0), (8, 6), (8, 7), (8, 9), (10, 7)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One `backend=` of mm_bf16: its devices, support of a bias, and steps of N and K."""

    backend: str
    ccs: Ccs
    bias: bool = False
    step: tuple[int, int] = (8, 8)  # vectors of 16 bytes


ROUTES = (
    Route(backend="cudnn", ccs=AMPERE_ON),
    Route(backend="cublaslt", ccs=AMPERE_ON, bias=True),
    Route(backend="cutlass", ccs=DATACENTRE_BLACKWELL),
    Route(backend="tgv", ccs=DATACENTRE_BLACKWELL, bias=True),
    Route(backend="tinygemm", ccs=HOPPER_ON, bias=True, step=(16, 64)),
    Route(backend="cutile", ccs=HOPPER_ON | {(10, 7)}),
    Route(backend="cute-dsl", ccs=DATACENTRE_BLACKWELL, bias=True, step=(16, 128)),
)
LIBRARY = replace(FLASHINFER, least_version=(0, 7, 0), needs=("mm_bf16",))


def _linear(backend: str) -> Callable[..., Any]:
    def linear(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
        import flashinfer  # type: ignore[import-not-found,unused-ignore]

        a, b = aligned(x).contiguous(), aligned(w).contiguous().t()
        offset = None if bias is None else aligned(bias)
        out = room(y, x, x.shape[0], w.shape[0])
        made = flashinfer.mm_bf16(a, b, bias=offset, out=out, backend=backend)
        return handed(made if residual is None else made.add_(residual), y)

    return linear


cudnn, cublaslt, cutlass, tgv = map(_linear, ("cudnn", "cublaslt", "cutlass", "tgv"))
tinygemm, cutile, cute_dsl = map(_linear, ("tinygemm", "cutile", "cute-dsl"))


def _limits(route: Route) -> Limits:
    def limits(w: Workload, cc: tuple[int, int]) -> str:
        if cc not in route.ccs:
            return f"its {route.backend} route is not for compute capability {spelled(cc)}"
        if w.trait("bias", False) and not route.bias:
            return f"its {route.backend} route adds no bias"
        n, k = route.step
        if w["N"] % n or w["K"] % k:
            return f"its {route.backend} route supports N in steps of {n} and K of {k}; here {w['N']} and {w['K']}"
        return ""

    return limits


KERNELS = tuple(
    LibraryKernel(
        "linear",
        f"flashinfer_mm:{route.backend.replace('-', '_')}",
        LIBRARY,
        backend="FLASHINFER",
        limits=_limits(route),
        dtypes=("bf16",),
    )
    for route in ROUTES
)
