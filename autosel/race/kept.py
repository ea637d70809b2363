"""Judge the results of drawn timed calls: in full against each other, and against the baseline's.

All calls of a pair have the same contents, so an arm's results must be equal. They are compared bit by bit; if they
differ (a sum in another order, another alignment), the largest bound of an element decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.ops.contract import Mismatch

SPREAD = 2.0  # of the largest bound: how far two correct results of an arm may differ
APART = 16.0  # the same for two arms; the bound is from some rows, and others may have larger ones

Results = Sequence[Tensor]


@dataclass(slots=True, kw_only=True)
class Kept:
    """The judgement of one seat. `bound` is the largest bound of each output's elements, once known.

    `counts` holds (calls whose results were compared in full, timed calls) by arm.
    """

    bound: tuple[float, ...] = ()
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def odd(self, arm: str, results: Sequence[Results]) -> Mismatch | None:
        """Return the first of an arm's results in a pair that differs from the others."""
        for number, other in enumerate(results[1:], 1):
            apart = _apart(results[0], other)
            if apart and not self._within(apart, SPREAD):
                found = f"an element is {max(apart):.3g} away"
                reason = f"one of {len(results)} timed calls on the same inputs gave another result ({found})"
                return Mismatch(check="timed_calls", reason=reason, evidence={"calls": len(results), "call": number})
        return None

    def stray(self, results: Results, base: Results) -> bool:
        """Return True if an arm's result is further from the baseline's than both their bounds explain."""
        apart = _apart(results, base)
        return bool(apart) and not self._within(apart, APART)

    def _within(self, apart: Sequence[float], factor: float) -> bool:
        return len(self.bound) == len(apart) and all(d <= factor * b for d, b in zip(apart, self.bound, strict=True))

    def add(self, arm: str, *, timed: int, checked: int) -> None:
        checked_before, timed_before = self.counts.get(arm, (0, 0))
        self.counts[arm] = checked_before + checked, timed_before + timed


def _apart(one: Results, other: Results) -> list[float]:
    """Return the largest distance of each output's elements; empty if all bits are the same.

    The distance of NaN from a number is infinite.
    """
    if all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True)):
        return []
    return [_distance(a, b) for a, b in zip(one, other, strict=True)]


def _distance(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    apart = (one.double() - other.double()).abs()
    apart[(bits(one) == bits(other)) | (one.isnan() & other.isnan())] = 0.0
    return float(apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
