"""The projections."""

from __future__ import annotations

from autosel.candidates.triton.base import TritonKernel, also, pdl
from autosel.knobs.gpu import gemv
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload


def _few(w: Workload, f: GpuFacts) -> str:
    return "" if w["M"] <= gemv.M_MOST else f"M = {w['M']} is above {gemv.M_MOST}: triton:gemm's range"


KERNELS = (TritonKernel("linear", "gemv", formula=also(gemv.gemv, pdl), limits=_few),)
