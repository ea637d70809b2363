"""The projections with few rows of x, on CUDA cores: linear, with plain and with fp8 weights, and the fused ones."""

from __future__ import annotations

from autosel.candidates.cuda.base import CudaKernel
from autosel.knobs.gpu import gemm, gemv
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload

ARGS = ("grid", "split_k")
MOST_FP8 = 2 * gemv.M_MOST
SCALED_ROWS = ("x", "w.codes", "w.scales", "bias", "residual")
MACROS = {"unroll": "AUTOSEL_UNROLL", "rows_per_warp": "AUTOSEL_ROWS"}


def _few(w: Workload, f: GpuFacts) -> str:
    """Refuse more than twice the rows of the crossover; near the crossover the race decides."""
    most = 2 * gemm.crossover(gemv.projection(w), f)
    return "" if w["M"] <= most else f"M = {w['M']} is above {most}, where tensor cores win by far"


def _few_fp8(w: Workload, f: GpuFacts) -> str:
    """Refuse more than two passes over the weights.

    PyTorch's code moves five bytes per weight (it unpacks them to two bytes and reads those) and multiplies on tensor
    cores. A pass over the weights for eight rows of x issues 1.8 + 16 instructions per weight, on an H200 in the time
    of 2.6 bytes: two passes take about as long.
    """
    return "" if w["M"] <= MOST_FP8 else f"M = {w['M']} is above {MOST_FP8}, where unpacking the weights once is faster"


def _projection(op: str, source: str) -> CudaKernel:
    return CudaKernel(op, source, formula=gemv.gemv, knob_args=ARGS, macros=MACROS, limits=_few)


KERNELS = (
    _projection("linear", "gemv"),
    _projection("norm_qkv", "norm_qkv"),
    _projection("gate_up", "gate_up"),
    _projection("lm_head", "lm_head"),
    CudaKernel(
        "linear",
        "gemv_fp8",
        formula=gemv.gemv,
        knob_args=ARGS,
        macros=MACROS,
        limits=_few_fp8,
        dtypes=("bf16", "fp16"),  # of x: eight rows of fp32 spill on sm_80 and sm_86
        formats=("fp8_e4m3-row",),
        operands=SCALED_ROWS,
    ),
)
