"""The projections with few rows of x, on CUDA cores: linear, and the fused ones."""

from __future__ import annotations

from autosel.candidates.cuda.base import CudaKernel
from autosel.knobs.gpu import gemm, gemv
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload

MACROS = {"unroll": "AUTOSEL_UNROLL", "rows_per_warp": "AUTOSEL_ROWS"}


def _few(w: Workload, f: GpuFacts) -> str:
    """Twice the crossover: near it the race decides."""
    most = 2 * gemm.crossover(gemv.projection(w), f)
    return "" if w["M"] <= most else f"M = {w['M']} is above {most}, where tensor cores win by far"


KERNELS = tuple(
    CudaKernel(op, source, formula=gemv.gemv, knob_args=("grid", "split_k"), macros=MACROS, limits=_few)
    for op, source in (("linear", "gemv"), ("norm_qkv", "norm_qkv"), ("gate_up", "gate_up"), ("lm_head", "lm_head"))
)
