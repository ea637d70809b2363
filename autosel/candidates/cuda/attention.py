"""Decode attention over a cache, contiguous or paged."""

from __future__ import annotations

import math

from autosel.candidates.cuda.base import CudaKernel
from autosel.knobs.gpu import attention
from autosel.knobs.gpu.facts import VECTOR_BYTES, WARP, GpuFacts
from autosel.values import DTYPE_BYTES, Workload

PIECES_MOST = 4  # vectors of 16 bytes a lane holds of a key
SLOT_BYTES = 16 << 10  # of a CTA's ring, a piece; kernels/cuda/attention.cuh
SLOTS_LEAST = 2


def _limits(w: Workload, f: GpuFacts) -> str:
    pieces = math.ceil(w["D"] * DTYPE_BYTES[w.dtype] / (WARP * VECTOR_BYTES))
    if pieces > PIECES_MOST:
        return f"heads of {w['D']} channels do not fit a warp's registers ({WARP * VECTOR_BYTES * PIECES_MOST} bytes)"
    need = SLOTS_LEAST * SLOT_BYTES * pieces
    if need > f.smem_per_cta:
        return f"needs {need} bytes of shared memory; a CTA has {f.smem_per_cta}"
    tiles = w["Hkv"] * math.ceil(w["Hq"] // w["Hkv"] * w["S"])
    return "" if tiles <= 65_535 and w["B"] <= 65_535 else "more than 65535 sequences or rows: a grid's limit"


KERNELS = tuple(
    CudaKernel(op, source, formula=attention.decode, knob_args=("tile", "stages", "chunk"), limits=_limits)
    for op, source in (("attn", "attn_decode"), ("paged_attn", "paged_attn_decode"))
)
