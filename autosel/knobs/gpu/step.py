"""The work of a whole decode step, and the shortest time that it can take."""

from __future__ import annotations

from dataclasses import dataclass

from autosel.knobs.gpu.facts import GpuFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One decode step, counted."""

    kernels: int
    bytes_read: float
    flops: float
    dtype: str = "bf16"


def floor_s(cost: StepCost, f: GpuFacts) -> float:
    """Return max(bytes / beta, FLOP / pi): the step at the attainable rates, before any overhead."""
    return max(cost.bytes_read / f.read, cost.flops / f.matrix_flops(cost.dtype))
