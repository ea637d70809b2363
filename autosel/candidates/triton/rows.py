"""Ops that process each row separately: rmsnorm, add_rmsnorm, rope, swiglu, geglu, sample."""

from __future__ import annotations

from autosel.candidates.triton.base import TritonKernel
from autosel.knobs.gpu import rows, sampling
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import DTYPE_BYTES, Workload

WIDEST_BYTES = 1 << 16  # 32 two-byte or 16 four-byte values per thread of 1024; beyond, registers spill
MOST_VOCABULARY = 1 << 24  # counts are stored as fp32


def _width(w: Workload, f: GpuFacts) -> str:
    widest = WIDEST_BYTES // DTYPE_BYTES[w.dtype]
    return "" if w["d"] <= widest else f"keeps a row in registers, up to {widest} elements of {w.dtype}; d = {w['d']}"


def _vocabulary(w: Workload, f: GpuFacts) -> str:
    return "" if w["V"] <= MOST_VOCABULARY else f"supports a vocabulary up to {MOST_VOCABULARY}; V = {w['V']}"


KERNELS = (
    TritonKernel("rmsnorm", "rmsnorm", formula=rows.rmsnorm, limits=_width),
    TritonKernel("add_rmsnorm", "add_rmsnorm", formula=rows.rmsnorm, limits=_width),
    TritonKernel("rope", "rope", formula=rows.rope),
    TritonKernel("swiglu", "swiglu", formula=rows.gated),
    TritonKernel("geglu", "geglu", formula=rows.gated),
    TritonKernel("sample", "sample", formula=sampling.sample, limits=_vocabulary),
)
