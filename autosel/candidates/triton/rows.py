"""rmsnorm and its neighbours: ops that treat each row on its own."""

from __future__ import annotations

from autosel.candidates.triton.base import TritonKernel
from autosel.knobs.gpu import rows
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload

WIDEST_ROW = 1 << 15  # 32 fp32 values a thread of 1024; at twice that, registers spill


def _width(w: Workload, f: GpuFacts) -> str:
    return "" if w["d"] <= WIDEST_ROW else f"keeps a row in registers, up to {WIDEST_ROW} elements; d = {w['d']}"


KERNELS = (TritonKernel("rmsnorm", "rmsnorm", formula=rows.rmsnorm, limits=_width),)
