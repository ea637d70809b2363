"""A mutant: the reference of an op with one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.ops.contract import DTYPE, Op
from autosel.parity.truth import run_baseline
from autosel.values import Workload

Operands = dict[str, Any]
Results = tuple[Tensor, ...]
Edit = Callable[[Tensor], Tensor | None]  # None: the fault cannot show in this tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The reference with one fault in `subject`, an argument or output.

    `before` returns changed operands, `after` changed results; None if the fault makes no difference to a call.
    """

    name: str
    subject: str
    before: Callable[[Operands], Operands | None] | None = None
    after: Callable[[Results], Results | None] | None = None

    def run(self, op: Op, w: Workload, inputs: Operands, right: Results) -> Results | None:
        """Return the mutant's results, or None if the fault makes no difference. `right`: the reference's results."""
        if self.after is not None:
            return self.after(right)
        assert self.before is not None
        changed = self.before(dict(inputs))
        return None if changed is None else exact(op, w, changed)


def exact(op: Op, w: Workload, inputs: Operands) -> Results:
    """Return the reference's results, rounded once to the outputs' dtypes; of an op that copies, the copies."""
    if any(a.role == "inout" for a in op.args):
        copied = run_baseline(op, inputs)
        assert copied is not None
        return copied
    dtypes = [torch.int64 if s.dtype == "int64" else DTYPE[s.dtype] for s in op.outputs(w)]
    return tuple(y.to(dtype) for y, dtype in zip(op.reference(inputs), dtypes, strict=True))


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if shape, dtype and bits are equal."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))
