"""Compute GPU closed forms: pure arithmetic on a fingerprint, also for devices that are not present.

A formula takes (Workload, GpuFacts) and returns Knobs with its text, its inputs and its reason. Every time in them is a
prediction from the device's figures until a race has measured the kernel.
"""

from __future__ import annotations

from autosel.knobs.gpu import attention, gemm, gemv, rows, sampling
from autosel.knobs.gpu.facts import Formula, GpuFacts, facts
from autosel.values import Knobs, Workload

__all__ = ["GpuFacts", "derive", "facts"]

PROJECTIONS = ("linear", "norm_qkv", "gate_up", "lm_head")
ROUTES: dict[str, Formula] = {"gemv": gemv.gemv, "stream": gemm.stream, "large": gemm.large}
FAMILIES: dict[str, tuple[str, Formula]] = {
    "attn": ("attn_decode", attention.decode),
    "paged_attn": ("attn_decode", attention.decode),
    "prefill_attn": ("attn_prefill", attention.prefill),
    "rmsnorm": ("rmsnorm", rows.rmsnorm),
    "add_rmsnorm": ("rmsnorm", rows.rmsnorm),
    "rope": ("rope", rows.rope),
    "swiglu": ("gated", rows.gated),
    "geglu": ("gated", rows.gated),
    "kv_append": ("kv_append", rows.kv_append),
    "sample": ("sample", sampling.sample),
}


def derive(w: Workload, f: GpuFacts) -> dict[str, Knobs]:
    """Return the knobs of each kernel family that could serve w; for a projection, the route first. Empty if there is
    no formula."""
    if w.op in PROJECTIONS:
        route = gemm.route(w, f)
        return {"route": route, route["route"]: ROUTES[route["route"]](w, f)}
    if w.op not in FAMILIES:
        return {}
    family, formula = FAMILIES[w.op]
    return {family: formula(w, f)}
