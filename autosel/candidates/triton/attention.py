"""Attention over a cache, contiguous or paged, causal prefill, and the append to a cache."""

from __future__ import annotations

from autosel.candidates.gpu import SCALED_HEADS
from autosel.candidates.triton.base import TritonKernel, also, fixed, shared, without_e4m3
from autosel.knobs.gpu import attention, rows
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Knob, Workload

WIDEST_HEAD = 512
LEAST_ROWS = 16  # rows per program
MOST_PARTS = 65_535  # programs along a grid's second and third dimension


def _limits(w: Workload, f: GpuFacts) -> str:
    if w["D"] > WIDEST_HEAD:
        return f"supports heads up to {WIDEST_HEAD} wide; the workload's are {w['D']}"
    if w["B"] * w["Hkv"] > MOST_PARTS:
        return f"supports up to {MOST_PARTS} sequences times KV heads; the workload has {w['B'] * w['Hkv']}"
    rows = w["Hq"] // w["Hkv"] * w["S"]
    if rows > MOST_PARTS * LEAST_ROWS:
        return f"supports up to {MOST_PARTS * LEAST_ROWS} query rows per KV head; the workload has {rows}"
    return ""


def _fp8_limits(w: Workload, f: GpuFacts) -> str:
    return without_e4m3(f) or _limits(w, f)


def _prefill_limits(w: Workload, f: GpuFacts) -> str:
    if w["D"] > WIDEST_HEAD:
        return f"supports heads up to {WIDEST_HEAD} wide; the workload's are {w['D']}"
    if w["B"] * w["Hq"] > MOST_PARTS:
        return f"supports up to {MOST_PARTS} sequences times query heads; the workload has {w['B'] * w['Hq']}"
    return ""


LATER = fixed("arrival", False, "a second kernel adds the splits")

DECODE, MERGED = also(attention.decode, shared), also(attention.decode, shared, LATER)


def _wgmma(f: GpuFacts) -> Knob:
    return Knob(
        name="wgmma",
        value=f.cc[0] == 9,
        formula="cc 9.x",
        inputs={"cc": f.cc[0] + f.cc[1] / 10},
        reason="matrix operands come from shared memory, so accumulators may take the registers",
    )


KERNELS = (
    TritonKernel("attn", "attn_decode", formula=DECODE, limits=_limits),
    TritonKernel("attn", "attn_decode", variant="merge", formula=MERGED, limits=_limits),
    *(
        TritonKernel(
            "attn",
            "attn_decode_fp8",
            variant=variant,
            formula=formula,
            limits=_fp8_limits,
            cache_formats=("fp8_e4m3-head",),
            operands=SCALED_HEADS,
        )
        for variant, formula in (("", DECODE), ("merge", MERGED))
    ),
    TritonKernel("paged_attn", "paged_attn_decode", formula=DECODE, limits=_limits),
    TritonKernel("paged_attn", "paged_attn_decode", variant="merge", formula=MERGED, limits=_limits),
    TritonKernel(
        "prefill_attn", "attn_prefill", formula=also(attention.prefill, shared, _wgmma), limits=_prefill_limits
    ),
    TritonKernel("kv_append", "kv_append", formula=rows.kv_append),
)
