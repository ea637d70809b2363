"""The checks of a candidate. Each one calls it, and raises RefusedError with the check's name and the values found.

Names of checks in a Failed: elements, rmse, bias, nan_pattern (ops/compare.py); result, inputs, guards (the form of the
result and changed memory); unwritten, outside_reads, repeat (runs that must agree); retention, anti_cache,
global_state, leak; other_thread, inference_mode, at_once, thread_count, one_storage, aliasing (calls.py); and, of the
worker process, raised, crash, timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.ops.contract import DTYPE_NAME, UNIT, Case, Inputs, Mismatch, Op
from autosel.parity.changes import Changes
from autosel.parity.session import Proof, RefusedError, Session
from autosel.parity.stage import Filling, Placed, far_strides, place, room_for
from autosel.parity.truth import Truth, Truths
from autosel.parity.ways import UNPREPARED
from autosel.workers import Arena, RaisedError
from autosel.workers.arena import Ref, contiguous

log = logging.getLogger(__name__)

REPEATED, KEPT, FRESH = "repeated calls", "a result kept across later calls", "fresh inputs"
GAPS, FAR_ROWS, MANY, STATE = "strided outputs", "rows beyond 2^31 elements", "many calls", "process-wide state"
MANY_CALLS = {
    REPEATED: "a race between threads; sums in a varying order",
    KEPT: "one output buffer for all calls; writes after the return",
    FRESH: "results cached by address or by part of the contents",
    GAPS: "outputs assumed to be contiguous",
    FAR_ROWS: "an int32 index",
    MANY: "a fault in one call of many; leaked memory or files",
    STATE: "threads, flags, random state, environment, signals or functions changed for the whole process",
}
FAR_TOUCHED_BYTES = 64 << 20
REPEATS = 20
FRESH_SEEDS = 6
LEAK_CALLS = 1000  # in total, if they take at most LEAK_MOST_S
LEAK_LOOP_S, LEAK_MOST_S = 0.15, 2.0  # seconds of one series of calls; seconds of LEAK_CALLS
KEPT_BYTES = 32 << 20  # results of these calls that are kept for comparison
LEAK_BYTES = 1 << 20  # growth in each series that is a leak: 1 KiB a call over 1,000 calls


@dataclass(slots=True)
class Tally:
    """The number of cases that passed, and the case with the largest error relative to its bound."""

    cases: int = 0
    worst: float = 0.0
    worst_case: str = ""

    def add(self, case: str, worst: float) -> None:
        self.cases += 1
        if worst >= self.worst:
            self.worst, self.worst_case = worst, case

    def merge(self, other: Tally) -> None:
        self.cases += other.cases
        if other.worst >= self.worst:
            self.worst, self.worst_case = other.worst, other.worst_case


class Battery:
    """All checks of one build with one set of knobs. They run in the worker of a session."""

    def __init__(
        self, session: Session, proof: Proof, op: Op, truths: Truths, seed: Callable[[str], int], *, calls: int = 1
    ) -> None:
        """`calls`: how many thousands of calls are made to find a fault that occurs in one call of many."""
        self.session, self.proof, self.op, self.truths, self.seed, self.calls = session, proof, op, truths, seed, calls
        self.name = session.load(proof)

    # --- one case -----------------------------------------------------------------------------------------------------

    def hostile(self, case: Case, tally: Tally) -> None:
        """Run one case twice, with different bytes in guards and outputs; then compare the values with the reference.

        A candidate that stores weights in its own layout also runs with the weights as they were passed.
        """
        truth = self.truths.of(self.op, case, self.seed(case.name))
        placed = self.place(case, truth.inputs)
        got = self.twice(placed, case.name, truth.inputs)
        tally.add(case.name, self.judge(case.name, truth, got))
        if self.proof.recipe.layout is not None:  # a server's first call comes before the weights are prepared
            got = self.call(placed, case.name, fill="none", way=UNPREPARED)
            tally.add(case.name, self.judge(case.name, truth, got))

    def twice(self, placed: Placed, case: str, inputs: Inputs, *, keep: Sequence[str] = ()) -> tuple[Tensor, ...]:
        """Call with guards and outputs full of NaN, then of random finite numbers: the results must agree."""
        first = self.call(placed, case, fill="none", skip=keep)
        second = self.call(placed, case, fill="some", skip=keep)
        left = placed.unwritten(first, second)
        if left is not None:
            name, count = left
            raise RefusedError("unwritten", case, f"{count} elements of {name} are not written", {"elements": count})
        if not self.agree(first, second, inputs):
            if self._steady(placed, case, (first, second), inputs, keep):
                reason = "the result depends on memory outside its inputs (or on what the outputs held before)"
                raise RefusedError("outside_reads", case, reason, _difference(first, second))
            raise RefusedError("repeat", case, "two runs on the same inputs differ", _difference(first, second))
        return first

    def _steady(
        self, placed: Placed, case: str, known: Sequence[tuple[Tensor, ...]], inputs: Inputs, keep: Sequence[str]
    ) -> bool:
        """Return True if each filling always gives the same result, so that the filling causes the difference.

        A result that takes one of two values at random passes all 24 comparisons less than once in a million times.
        """
        fillings: tuple[Filling, ...] = ("none", "some")
        for _, (filling, result) in product(range(12), zip(fillings, known, strict=True)):
            if not self.agree(result, self.call(placed, case, fill=filling, skip=keep), inputs):
                return False
        return True

    def judge(self, case: str, truth: Truth, got: Sequence[Tensor]) -> float:
        """Compare with the float64 reference. Return the largest error relative to its bound."""
        found = truth.judge(got)
        if isinstance(found, Mismatch):
            raise RefusedError(found.check, case, found.reason, found.evidence)
        return found.worst

    def accept(self, case: str, inputs: Inputs, got: Sequence[Tensor], tally: Tally) -> None:
        """Count a result that the reference of these inputs accepts. Raises RefusedError otherwise."""
        tally.add(case, self.judge(case, Truth(self.op, inputs), got))

    def agree(self, one: Sequence[Tensor], other: Sequence[Tensor], inputs: Inputs) -> bool:
        """Return True if two results agree: bitwise, unless the candidate is declared nondeterministic.

        Results of a nondeterministic candidate may differ by a quarter of the bound plus one step of the output's
        dtype, because two nearly equal sums may round to neighbouring numbers.
        """
        if all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True)):
            return True
        if self.proof.candidate.deterministic or not all(t.is_floating_point() for t in one):
            return False
        reference = self.op.reference(inputs)
        for a, b, tolerance in zip(one, other, self.op.bound(inputs, reference), strict=True):
            apart = (a.double() - b.double()).abs()
            step = 2 * UNIT[DTYPE_NAME[a.dtype]] * torch.maximum(a.double().abs(), b.double().abs())
            if not ((apart <= tolerance / 4 + step) | (bits(a) == bits(b))).all():
                return False
        return True

    # --- many calls ---------------------------------------------------------------------------------------------------

    def habits(
        self, plain: Case, other: Case, cheap: Case, apart: Case | None = None
    ) -> dict[str, Callable[[Tally], None]]:
        """Return, by name, the checks that need several calls. They are independent of each other.

        `plain` is the case that most checks run; `other` runs between its calls; `cheap` has short calls; `apart` has
        rows with a distance between them.
        """
        checks: dict[str, Callable[[Tally], None]] = {
            REPEATED: lambda _: self._repeat(plain, other),
            KEPT: lambda _: self._retention(plain),
            FRESH: lambda tally: self._fresh(plain, tally),
            MANY: lambda _: self._leak(plain, cheap),
        }
        if self.proof.candidate.writes_out and self.op.outputs(plain.workload):  # else it allocates its outputs
            checks[GAPS] = lambda tally: self._gaps(plain, tally)
        if apart is not None:
            checks[FAR_ROWS] = lambda tally: self._far(apart, tally)
        return checks

    def first(self, plain: Case) -> Placed:
        """Place a case in the first scratch area, with the same inputs each time."""
        return self.place(plain, plain.make(self.seed("habits 1")), side=0)

    def _repeat(self, plain: Case, other: Case) -> None:
        case, here = REPEATED, self.first(plain)
        there = self.place(other, other.make(self.seed("habits 3")))
        first, between = self.call(here, case, fill="none"), self.call(there, case, fill="none")
        for i in range(REPEATS - 1):
            self._as_before(first, self.call(here, case), here, case, i + 2)
            self._as_before(between, self.call(there, case), there, case, i + 2)

    def _as_before(self, first: Sequence[Tensor], again: Sequence[Tensor], placed: Placed, case: str, run: int) -> None:
        if not self.agree(first, again, placed.inputs):
            evidence = _difference(first, again) | {"run": run}
            raise RefusedError("repeat", case, f"run {run} on the same inputs differs from the first", evidence)

    def _retention(self, plain: Case) -> None:
        """Check that an earlier result does not change when the candidate is called again on other tensors."""
        case, here = KEPT, self.first(plain)
        kept = self.call(here, case, fill="none", hold="kept")
        self.judge(case, Truth(self.op, here.inputs), kept)
        elsewhere = self.place(plain, plain.make(self.seed("habits 2")))
        one = self.call(elsewhere, case, fill="none")
        self._as_before(one, self.call(elsewhere, case, fill="some"), elsewhere, case, 2)
        now = here.results() if self.proof.candidate.writes_out else self.session.dump("kept", self.proof, here)
        if not all(torch.equal(bits(a), bits(b)) for a, b in zip(kept, now, strict=True)):
            reason = "a later call changed an earlier result: the candidate reuses or still writes that memory"
            raise RefusedError("retention", case, reason, _difference(kept, now))
        damage = here.damage()
        if damage is not None:
            raise RefusedError("retention", case, f"after a later call, {damage.reason}", damage.evidence)

    def _fresh(self, plain: Case, tally: Tally) -> None:
        """Call with new contents at the same addresses, then change one argument after the other, then move the last
        contents to other addresses.

        A part of an operand may decide nothing in one draw, as the queries of a sequence with a single key: it is
        changed in another draw.
        """
        here = self.first(plain)
        self.accept(FRESH, here.inputs, self.call(here, FRESH, fill="none"), tally)
        cases = [f"{FRESH} {i + 1}" for i in range(FRESH_SEEDS)]
        drawn: dict[str, Inputs] = {case: plain.make(self.seed(case)) for case in cases}
        for case, inputs in drawn.items():
            got = self._renewed(plain, here, inputs, case, tally)
        changes = Changes(self.op, plain.workload, inputs, self.seed(FRESH))
        for what, inputs in changes.all():
            got = self._renewed(plain, here, inputs, f"{FRESH}, {what}", tally)
        for case in cases[-2::-1]:
            if not (left := changes.undecided):
                break
            inputs = drawn[case]
            got = self._renewed(plain, here, inputs, case, tally)
            changes = Changes(self.op, plain.workload, inputs, self.seed(FRESH))
            for what, inputs in changes.of(left):
                got = self._renewed(plain, here, inputs, f"{case}, {what}", tally)
        if not self._agrees_moved(plain, inputs, case, got):
            reason = "the same contents at other addresses give a different result"
            raise RefusedError("anti_cache", case, reason, {})

    def _renewed(self, plain: Case, here: Placed, inputs: Inputs, case: str, tally: Tally) -> tuple[Tensor, ...]:
        here.renew(inputs)
        got = self.call(here, case, fill="none")
        try:
            self.accept(case, inputs, got, tally)
        except RefusedError as refused:
            raise self._cached(plain, inputs, case, got, refused) from None
        return got

    def _agrees_moved(self, plain: Case, inputs: Inputs, case: str, got: Sequence[Tensor]) -> bool:
        return self.agree(got, self.call(self.place(plain, inputs), case, fill="none"), inputs)

    def _cached(self, plain: Case, inputs: Inputs, case: str, got: Sequence[Tensor], was: RefusedError) -> RefusedError:
        """Return the error of a wrong result: anti_cache if new addresses give a different result, else `was`."""
        if self._agrees_moved(plain, inputs, case, got):
            return was
        reason = f"new contents at the same addresses give a stale result: {was.reason}"
        return RefusedError("anti_cache", case, reason, was.evidence)

    def _gaps(self, plain: Case, tally: Tally) -> None:
        """Check outputs with gaps between their rows."""
        inputs = plain.make(self.seed("habits 1"))
        self.accept(GAPS, inputs, self.twice(self.place(plain, inputs, gap=5), GAPS, inputs), tally)

    def _far(self, apart: Case, tally: Tally) -> None:
        """Check inputs whose first and last rows are more than 2^31 elements apart: an int32 index cannot reach them.

        The memory between the rows is reserved and never touched. If it cannot be reserved, the check is skipped with
        a warning in the log.
        """
        inputs = apart.make(self.seed(FAR_ROWS))
        strides = far_strides(inputs)
        outputs_bytes = sum(o.nbytes for o in self.op.allocate(apart.workload) if o is not None)
        try:
            arena = Arena(room_for(inputs, strides, outputs_bytes), touched_bytes=FAR_TOUCHED_BYTES)
        except OSError as error:
            log.warning("parity skips the check of %s: %s", FAR_ROWS, error)
            return
        with arena:
            try:
                placed = place(arena, self.op, apart.workload, inputs, strides=strides)
                self.accept(FAR_ROWS, inputs, self.twice(placed, FAR_ROWS, inputs), tally)
            except RaisedError as error:
                if not error.retryable or self.session.on_host:
                    raise
                log.warning("parity skips the check of %s: %s has too little memory", FAR_ROWS, self.session.device)
            finally:
                if self.session.worker.exit is None:
                    self.session.detach(arena)

    def _leak(self, plain: Case, cheap: Case) -> None:
        """Run several series of calls on the same inputs: 1,000 calls or more if these take at most LEAK_MOST_S.

        Every result that fits into KEPT_BYTES must equal the first. The first series is a warm-up. Private memory that
        grows in each later one is a leak; so are open files that grow by more than one per 100 calls.
        """
        self.session.case = MANY
        stretches = 2 + self.calls
        here, first, once_s = self._timed(plain)
        if self._in_time(once_s) * stretches < LEAK_CALLS:
            here, first, once_s = self._timed(cheap)
        least = -(-LEAK_CALLS // stretches) if LEAK_CALLS * once_s <= LEAK_MOST_S else 20
        times = max(least, min(LEAK_CALLS, self._in_time(once_s)))
        deadline_s = self.session.call_deadline_s + 20 * times * once_s
        kept = self._room(first, times)
        readings, files = [], []
        for stretch in range(stretches):
            self.session.loop(self.name, self.proof, here, times, deadline_s, kept)
            readings.append(self.session.private_bytes())
            files.append(self.session.open_files())
            self._all_alike(first, kept, here, stretch * times)
        growths = [b - a for a, b in pairwise(readings)]
        if min(growths) > LEAK_BYTES:
            grown = sum(growths) / (len(growths) * times)
            reason = f"the process's memory grows by {grown:.0f} bytes per call"
            raise RefusedError("leak", MANY, reason, {"bytes_per_call": grown, "calls": 2 * times})
        if min(b - a for a, b in pairwise(files)) > times // 100:
            opened = files[-1] - files[0]
            reason = f"{opened} more files are open after {2 * times} calls"
            raise RefusedError("leak", MANY, reason, {"files": opened, "calls": 2 * times})

    def _timed(self, case: Case) -> tuple[Placed, tuple[Tensor, ...], float]:
        """Return the placed case, its result, and the seconds of its second call."""
        here = self.first(case)
        first = self.call(here, MANY, fill="none")
        self._as_before(first, self.call(here, MANY), here, MANY, 2)
        return here, first, max(1e-6, self.session.last_call_ns * 1e-9)

    def _in_time(self, once_s: float) -> int:
        return int(self.calls * LEAK_LOOP_S / once_s)

    def _room(self, first: Sequence[Tensor], times: int) -> list[Ref]:
        """Reserve memory for the results of `times` calls, or for as many as fit into KEPT_BYTES."""
        arena = self.session.scratch[1]
        arena.used_bytes = 0
        count = max(1, min(times, KEPT_BYTES // max(1, sum(y.nbytes for y in first))))
        shapes = [(count, *y.shape) for y in first]
        return [arena.empty(s, y.dtype, contiguous(s)) for s, y in zip(shapes, first, strict=True)]

    def _all_alike(self, first: Sequence[Tensor], kept: Sequence[Ref], here: Placed, before: int) -> None:
        found = [self.session.scratch[1].tensor(ref) for ref in kept]
        if self.agree([y.expand_as(many) for y, many in zip(first, found, strict=True)], found, here.inputs):
            return
        for i in range(len(found[0])):
            self._as_before(first, [many[i] for many in found], here, MANY, before + i + 1)

    def state(self) -> None:
        """Check that the process-wide state is unchanged since before the candidate was loaded."""
        self.session.case = STATE
        changed = self.session.changed()
        if changed:
            name, (was, now) = next(iter(changed.items()))
            reason = f"the candidate changed the process's {name} from {was} to {now}"
            raise RefusedError("global_state", STATE, reason, changed)

    # --- help ---------------------------------------------------------------------------------------------------------

    def place(self, case: Case, inputs: Inputs, *, gap: int = 0, side: int = 1) -> Placed:
        """Place operands in a scratch area, over its earlier contents. `side`: 0 for the area of `first`, 1 for the
        other.
        """
        arena = self.session.scratch[side]
        arena.used_bytes = 0
        return place(arena, self.op, case.workload, inputs, gap=gap)

    def call(
        self,
        placed: Placed,
        case: str,
        *,
        fill: Filling | None = None,
        hold: str = "",
        skip: Sequence[str] = (),
        way: str = "",
    ) -> tuple[Tensor, ...]:
        """Call, with `fill` after the operands are written again, except those in `skip`."""
        if fill is not None:
            placed.fill(fill, keep=skip)
        return self.session.call(self.name, self.proof, placed, case, hold=hold, skip=skip, way=way)


def _difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, Any]:
    """Return the number of elements that differ, and the place and values of the first."""
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        apart = bits(a) != bits(b)
        if apart.any():
            where = tuple(int(i) for i in apart.nonzero()[0])
            return {
                "output": index,
                "elements": int(apart.sum()),
                "index": list(where),
                "values": [str(a[where].item()), str(b[where].item())],
            }
    return {}
