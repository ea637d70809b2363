"""liger-kernel: Triton kernels for training whose forward parts can serve (signatures: 0.8.5).

Its functions are called by their classes, because `liger_kernel.transformers` would import transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import Library, LibraryKernel, Limits, parsed, spelled, sum_then_norm
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

LIGER = Library(distribution="liger-kernel", module="liger_kernel.ops", least_version=(0, 5, 0))
FUSED_ADD = replace(LIGER, needs=("LigerFusedAddRMSNormFunction",))
PARTIAL_ROPE = (0, 8, 5)  # earlier versions are assumed to rotate whole heads only
DTYPES = ("bf16", "fp16", "fp32")


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found,unused-ignore]

    # Gemma's casting mode multiplies by (1 + weight) in fp32, as the contract does.
    mode = "gemma" if offset else "llama"
    made: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, mode, False)
    return made


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, sandwich: int
) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import (  # type: ignore[import-not-found,unused-ignore]
        LigerFusedAddRMSNormFunction,
    )

    assert not sandwich, "it adds, then normalises"
    mode = "gemma" if offset else "llama"
    y, summed = LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, mode, False)
    return y, summed


def rope(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, style: int) -> tuple[Tensor, Tensor]:
    """Rotate copies: the function works in place on packed heads.

    q is [1,Hq,M,D], cos and sin are [1,M,R] with each angle twice. It multiplies in their dtype, which is fp32 here.
    """
    import torch
    from liger_kernel.ops.rope import LigerRopeFunction  # type: ignore[import-not-found,unused-ignore]

    assert style == 0, "it rotates halves"
    angle = (positions[:, None] * inv_freq).repeat(1, 2)
    own = (t.clone(memory_format=torch.contiguous_format).transpose(0, 1)[None] for t in (q, k))
    turned = LigerRopeFunction.apply(*own, angle.cos()[None], angle.sin()[None])
    return turned[0][0].transpose(0, 1), turned[1][0].transpose(0, 1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found,unused-ignore]

    made: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return made


def geglu(gate: Tensor, up: Tensor, tanh: int) -> Tensor:
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # type: ignore[import-not-found,unused-ignore]

    assert tanh, "its GELU is the tanh approximation"
    made: Tensor = LigerGELUMulFunction.apply(gate, up)
    return made


def _halves(w: Workload, _: tuple[int, int]) -> str:
    if w.trait("style", 0):
        return "it rotates halves of a head; the workload's pairs are interleaved"
    if w["R"] != w["D"] and parsed(LIGER.version()) < PARTIAL_ROPE:
        return (
            f"before {spelled(PARTIAL_ROPE)} it may rotate whole heads only; the workload rotates {w['R']} of {w['D']}"
        )
    return ""


def _tanh(w: Workload, _: tuple[int, int]) -> str:
    return "" if w.trait("tanh", 0) else "its GELU is the tanh approximation"


def _kernel(op: str, limits: Limits = lambda w, cc: "", library: Library = LIGER) -> LibraryKernel:
    return LibraryKernel(op, f"liger:{op}", library, backend="LIGER", limits=limits, dtypes=DTYPES, writes_out=False)


KERNELS = (
    _kernel("rmsnorm"),
    _kernel("add_rmsnorm", sum_then_norm, FUSED_ADD),
    _kernel("rope", _halves),
    _kernel("swiglu"),
    _kernel("geglu", _tanh),
)
