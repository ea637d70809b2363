"""Decode attention over a cache, contiguous, paged or in fp8."""

from __future__ import annotations

import math
from bisect import bisect_left

from autosel.candidates.cuda.base import CudaKernel
from autosel.candidates.gpu import SCALED_HEADS
from autosel.knobs.gpu import attention
from autosel.knobs.gpu.attention import WARPS
from autosel.knobs.gpu.facts import VECTOR_BYTES, WARP, GpuFacts
from autosel.values import Workload

PIECES_MOST = 4  # vectors of 16 bytes that a lane holds of a key
SLOT_BYTES = 16 << 10  # of a CTA's ring, per vector; kernels/cuda/attention.cuh
SLOTS_LEAST = 2
TILE_ROWS_LEAST, TILE_WIDTHS = 4, (64, 96, 128, 256)  # kernels/cuda/attention_mma.cuh
TILE_WIDTH_MOST = TILE_WIDTHS[-1]


def _limits(w: Workload, f: GpuFacts) -> str:
    pieces = math.ceil(w["D"] * attention.cache_bytes(w) / (WARP * VECTOR_BYTES))
    if pieces > PIECES_MOST:
        return f"heads of {w['D']} channels do not fit a warp's registers ({WARP * VECTOR_BYTES * PIECES_MOST} bytes)"
    need = SLOTS_LEAST * SLOT_BYTES * pieces
    if need > f.smem_per_cta:
        return f"needs {need} bytes of shared memory; a CTA has {f.smem_per_cta}"
    tiles = w["Hkv"] * math.ceil(w["Hq"] // w["Hkv"] * w["S"])
    return "" if tiles <= 65_535 and w["B"] <= 65_535 else "more than 65535 sequences or rows: a grid's limit"


def _tile_limits(w: Workload, f: GpuFacts) -> str:
    rows = w["Hq"] // w["Hkv"] * w["S"]
    if rows < TILE_ROWS_LEAST:
        return f"{rows} query rows per KV head leave tiles of 16 empty: cuda:attn_decode's range"
    if w["D"] > TILE_WIDTH_MOST:
        return f"heads of {w['D']} channels do not fit a warp's registers ({TILE_WIDTH_MOST})"
    room = WARPS * 16 * (TILE_WIDTHS[bisect_left(TILE_WIDTHS, w["D"])] + 2) * 4
    if room > f.smem_per_cta:
        return f"needs {room} bytes of shared memory; a CTA has {f.smem_per_cta}"
    return "" if w["Hkv"] * rows <= 65_535 and w["B"] <= 65_535 else "more than 65535 sequences or rows: a grid's limit"


ARGS = ("tile", "stages", "chunk")
HALVES = ("bf16", "fp16")
KERNELS = (
    CudaKernel("attn", "attn_decode", formula=attention.decode, knob_args=ARGS, limits=_limits),
    CudaKernel(
        "attn",
        "attn_decode_fp8",
        formula=attention.decode,
        knob_args=ARGS,
        limits=_limits,
        cache_formats=("fp8_e4m3-head",),
        operands=SCALED_HEADS,
    ),
    CudaKernel("paged_attn", "paged_attn_decode", formula=attention.decode, knob_args=ARGS, limits=_limits),
    *(
        CudaKernel(op, source, formula=attention.decode, knob_args=ARGS, limits=_tile_limits, dtypes=HALVES)
        for op, source in (("attn", "attn_decode_mma"), ("paged_attn", "paged_attn_decode_mma"))
    ),
)
