"""Check a workload at full size: random inputs, new ones at the same and at other addresses, repeats, a needle.

Sampled rows are compared with the float64 reference; so are the elements that differ most from the baseline (whole.py).
The operands and the bytes around them are compared in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.ops.contract import DTYPE, Inputs, Op, Rows
from autosel.ops.stored import argument_of, leaves
from autosel.parity import whole
from autosel.parity.battery import Battery, Tally
from autosel.parity.needle import needle
from autosel.parity.session import RefusedError
from autosel.parity.stage import GUARD_BYTES, Placed, place
from autosel.parity.truth import Truth
from autosel.values import Workload
from autosel.workers import Arena

ROWS = 8
ROW_ELEMENTS = 1 << 20
REPEATS = 3


class FullSize:
    """The check of one workload. `draw` makes its inputs, which can run while a worker starts; `check` frees them."""

    def __init__(self, op: Op, w: Workload, seed: Callable[[str], int]) -> None:
        self.op, self.w, self.seed = op, w, seed
        self.streamed = [a.name for a in op.args if a.role == "streamed"]
        self.first: dict[str, Any] = {}
        self.second: dict[str, Any] = {}

    def draw(self) -> None:
        if not self.first:
            self.first = self.op.inputs(self.w, self.seed(f"{self.w.key} 1"))
            self.second = self.op.refresh(self.w, self.first, self.seed(f"{self.w.key} 2"))

    def check(self, battery: Battery, tally: Tally) -> None:
        """Run all checks at full size. Raises RefusedError, like the battery."""
        self.draw()
        with Arena(self._room()) as arena:
            try:
                here = place(arena, self.op, self.w, self.first)
                got = battery.twice(here, self._case("random"), self.first, keep=self.streamed)
                self._judge(battery, self.first, got, "random", tally)
                there = place(arena, self.op, self.w, self.second, share=here)
                self._fresh(battery, here, there, tally)
                self._untouched(here)
                planted = needle(self.op, self.w, self.second, self.seed(f"{self.w.key} 3"))
                here.renew(planted)
                same = [n for n in self.streamed if planted[n] is self.second[n]]
                got = battery.call(here, self._case("needle"), fill="none", skip=same)
                self._judge(battery, planted, got, "needle", tally)
            finally:
                self.first, self.second = {}, {}
                battery.session.detach(arena)

    def _fresh(self, battery: Battery, here: Placed, there: Placed, tally: Tally) -> None:
        """Call with new activations at the old addresses, with the same ones at new addresses, and repeat both."""
        here.renew(self.second)
        got = self._call(battery, here, "fresh inputs")
        self._judge(battery, self.second, got, "fresh inputs", tally)
        if not self._same(battery, got, self._call(battery, there, "fresh inputs")):
            reason = "the same contents at other addresses give a different result"
            raise RefusedError("anti_cache", self._case("fresh inputs"), reason, {})
        for _ in range(REPEATS):
            self._call(battery, there, "repeated")
            if not self._same(battery, got, self._call(battery, here, "repeated")):
                raise RefusedError("repeat", self._case("repeated"), "two runs on the same inputs differ", {})

    def _call(self, battery: Battery, placed: Placed, what: str) -> tuple[Tensor, ...]:
        return battery.call(placed, self._case(what), fill="none", skip=self.streamed)

    def _untouched(self, here: Placed) -> None:
        """Compare the streamed operands, hundreds of megabytes, once for all calls before."""
        damage = here.damage()
        if damage is not None:
            raise RefusedError(damage.check, self._case("random"), damage.reason, damage.evidence)

    def _same(self, battery: Battery, one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
        """Return True if results agree: bitwise in full, or, on the sampled rows, as `Battery.agree` allows."""
        if all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True)):
            return True
        rows = self.op.rows(self.w, self.second, ROWS, self.seed(self.w.key))
        return battery.agree(rows.pick(one), rows.pick(other), rows.inputs)

    def _judge(self, battery: Battery, inputs: Inputs, got: Sequence[Tensor], what: str, tally: Tally) -> None:
        case = self._case(what)
        rows = self.op.rows(self.w, inputs, self._count(), self.seed(case))
        tally.add(case, battery.judge(case, Truth(self.op, rows.inputs), rows.pick(got)))
        worst = self._worst(battery, inputs, got, what)
        if worst is not None:
            truth = Truth(self.op, worst.inputs, averages=False)
            tally.add(case, battery.judge(case, truth, worst.pick(got)))

    def _worst(self, battery: Battery, inputs: Inputs, got: Sequence[Tensor], what: str) -> Rows | None:
        """Return the elements that differ most from the baseline; None without Op.around or with a slow baseline."""
        if type(self.op).around is Op.around or self.op.flops(self.w) > whole.MOST_FLOPS:
            return None
        base = battery.truths.baseline(self.op, inputs, (f"{what} {self.w.key}", self.seed(self.w.key)))
        return None if base is None else whole.worst(self.op, self.w, inputs, got[0], base[0])

    def _count(self) -> int:
        """Return the number of rows to judge in float64: ROWS, or up to ROW_ELEMENTS for an op with cheap rows."""
        if type(self.op).around is not Op.around or "M" not in self.op.dim_names:
            return ROWS
        elements = sum(math.prod(spec.shape) for spec in self.op.outputs(self.w))
        return max(ROWS, ROW_ELEMENTS * self.w["M"] // max(1, elements))

    def _case(self, what: str) -> str:
        return f"{what} at {self.w.shape_text}"

    def _room(self) -> int:
        """Return the bytes for one set of streamed operands and two sets of the others, with guards."""
        tensors = leaves(self.first)
        total = sum(v.nbytes * (1 if argument_of(n) in self.streamed else 2) for n, v in tensors.items())
        for spec in self.op.outputs(self.w):
            itemsize = 8 if spec.dtype == "int64" else DTYPE[spec.dtype].itemsize
            total += 2 * itemsize * int(torch.Size(spec.shape).numel())
        return total + 4 * (GUARD_BYTES + 4096) * (len(tensors) + len(self.op.output_names) + 1)
