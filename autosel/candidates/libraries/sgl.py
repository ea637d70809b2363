"""sgl-kernel: SGLang's prebuilt kernels (signatures: 0.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import Library, LibraryKernel, plain_norm, whole_vectors
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

SGL = Library(
    distribution="sgl-kernel",
    module="sgl_kernel",
    least_version=(0, 1, 0),
    needs=("rmsnorm", "gemma_rmsnorm", "silu_and_mul"),
)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]

    made: Tensor = (sgl_kernel.gemma_rmsnorm if offset else sgl_kernel.rmsnorm)(x, weight, eps, y)
    return made


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Its operand is gate and up side by side: laid so by a copy, which the time includes."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]
    import torch

    made: Tensor = sgl_kernel.silu_and_mul(torch.cat((gate, up), -1))
    return made


def geglu(gate: Tensor, up: Tensor, tanh: int) -> Tensor:
    """As swiglu."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]
    import torch

    operand = torch.cat((gate, up), -1)
    made: Tensor = sgl_kernel.gelu_tanh_and_mul(operand) if tanh else sgl_kernel.gelu_and_mul(operand)
    return made


def _norm(w: Workload, cc: tuple[int, int]) -> str:
    return "" if w.trait("offset", 0.0) in (0.0, 1.0) else plain_norm(w, cc)


KERNELS = (
    LibraryKernel("rmsnorm", "sgl:rmsnorm", SGL, backend="SGL", limits=_norm),
    LibraryKernel("swiglu", "sgl:swiglu", SGL, backend="SGL", writes_out=False, limits=whole_vectors),
    LibraryKernel("geglu", "sgl:geglu", SGL, backend="SGL", writes_out=False, limits=whole_vectors),
)
