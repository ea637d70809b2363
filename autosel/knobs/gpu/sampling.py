"""Compute knobs of sampling: how many CTAs share a row of logits."""

from __future__ import annotations

import math

from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Knob, Knobs, Workload

MERGE_S = 0.05e-6  # cost of one more partial result in the merge: an L2 read in its serial part. Estimate
REGISTER_TOP_K = 64


def sample(w: Workload, f: GpuFacts) -> Knobs:
    """Return ctas_per_row, register_top_k. Ties go to the lowest index, so every merge is ordered.

    A row of V fp32 logits read by c CTAs takes 4 V / (c rho), merging c partial results c * 0.05 us: least at c =
    sqrt(4 V / (rho * 0.05 us)), at most S / B. V = 128256: H200 12, RTX 5070 Ti 17.
    """
    best = math.sqrt(4 * w["V"] / (f.rho * MERGE_S))
    return Knobs(
        settings=(
            Knob(
                name="ctas_per_row",
                value=max(1, min(round(best), f.sms // w["B"])),
                formula="sqrt(4 * V / (rho * 0.05 us)), at most S / B",
                inputs={"V": w["V"], "rho": f.rho, "S": f.sms, "B": w["B"]},
            ),
            Knob(
                name="register_top_k",
                value=REGISTER_TOP_K,
                formula="64",
                inputs={},
                reason="up to here a CTA keeps its best in registers; radix passes would read the logits again",
            ),
        )
    )
