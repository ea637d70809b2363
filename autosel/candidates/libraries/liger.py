"""liger-kernel: Triton kernels for training whose forward halves serve (signatures: 0.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import Library, LibraryKernel

if TYPE_CHECKING:
    from torch import Tensor

LIGER = Library(distribution="liger-kernel", module="liger_kernel.ops", least_version=(0, 5, 0))


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found,unused-ignore]

    # Gemma's casting mode multiplies by (1 + weight) in fp32, as its contract does.
    mode = "gemma" if offset else "llama"
    made: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, mode, False)
    return made


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found,unused-ignore]

    made: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return made


def geglu(gate: Tensor, up: Tensor, tanh: int) -> Tensor:
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # type: ignore[import-not-found,unused-ignore]

    assert tanh, "its GELU is the tanh approximation"
    made: Tensor = LigerGELUMulFunction.apply(gate, up)
    return made


KERNELS = (
    LibraryKernel(
        "rmsnorm", "liger:rmsnorm", LIGER, backend="LIGER", dtypes=("bf16", "fp16", "fp32"), writes_out=False
    ),
    LibraryKernel("swiglu", "liger:swiglu", LIGER, backend="LIGER", dtypes=("bf16", "fp16", "fp32"), writes_out=False),
    LibraryKernel(
        "geglu",
        "liger:geglu",
        LIGER,
        backend="LIGER",
        dtypes=("bf16", "fp16", "fp32"),
        writes_out=False,
        limits=lambda w, cc: "" if w.trait("tanh", 0) else "its GELU is the tanh approximation",
    ),
)
