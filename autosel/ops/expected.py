"""The expected result of an op for some inputs, computed once for all results that it judges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autosel.ops.compare import compare
from autosel.ops.contract import Inputs, Match, Mismatch, Op


class Expected:
    """Reference and bound of the current inputs, or without a bound `own`, the judge that the op has for them."""

    def __init__(self, op: Op, inputs: Inputs) -> None:
        self.own = op.own_judge(inputs)
        if self.own is None:
            self.reference = op.reference(inputs)
            self.bound = op.bound(inputs, self.reference)

    def judge(self, got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch:
        """Judge a result as `Op.verify` does."""
        return self.own(got, baseline) if self.own else compare(got, self.reference, self.bound, baseline)
