"""Attention over a cache, contiguous or paged, causal prefill, and the append to a cache."""

from __future__ import annotations

from autosel.candidates.triton.base import TritonKernel, also, fixed, shared
from autosel.knobs.gpu import attention
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload

WIDEST_HEAD = 512
MOST_PARTS = 65_535  # programs along a grid's second and third dimension


def _limits(w: Workload, f: GpuFacts) -> str:
    if w["D"] > WIDEST_HEAD:
        return f"takes heads up to {WIDEST_HEAD} wide; the workload's are {w['D']}"
    if w["B"] * w["Hkv"] > MOST_PARTS:
        return f"takes up to {MOST_PARTS} sequences times KV heads; the workload has {w['B'] * w['Hkv']}"
    return ""


LATER = fixed("arrival", False, "a second kernel adds the splits")

KERNELS = (
    TritonKernel("attn", "attn_decode", formula=also(attention.decode, shared), limits=_limits),
    TritonKernel("attn", "attn_decode", variant="merge", formula=also(attention.decode, shared, LATER), limits=_limits),
)
