"""What an op must give for some inputs: computed once, however many results are judged by it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autosel.ops.compare import compare
from autosel.ops.contract import Inputs, Match, Mismatch, Op


class Expected:
    """Reference and bound of these inputs, as they are now. `own`: the op has a judgement of its own, and no bound."""

    def __init__(self, op: Op, inputs: Inputs) -> None:
        self.op, self.inputs = op, inputs
        self.own = type(op).verify is not Op.verify
        if not self.own:
            self.reference = op.reference(inputs)
            self.bound = op.bound(inputs, self.reference)

    def judge(self, got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch:
        """The same as `Op.verify`."""
        if self.own:
            return self.op.verify(self.inputs, got, baseline)
        return compare(self.op, got, self.reference, self.bound, baseline)
