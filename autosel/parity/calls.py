"""Checks of the ways in which callers use a kernel, as part of check.HABITS.

Calls from other threads, two calls at once, other numbers of threads, all operands in one storage, and results that
the caller overwrites. The checks are independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from autosel import devices
from autosel.ops.contract import Case, Inputs
from autosel.parity.battery import Battery, Tally
from autosel.parity.session import RefusedError
from autosel.parity.stage import Placed, place
from autosel.parity.ways import HERE, INFERENCE, NEW, ONE_STORAGE, OTHER

THREADS, AT_ONCE, COUNTS = "calls from other threads", "two calls at once", "other numbers of threads"
STORAGE, OWNED = "operands in one storage", "a result that its caller overwrites"
HABITS = {
    THREADS: "thread-local state; inference mode",
    AT_ONCE: "one scratch buffer for all calls",
    COUNTS: "shares of work fixed for the first number of threads, or for a few numbers",
    STORAGE: "a storage's first byte taken as the tensor's; one tensor passed for two arguments",
    OWNED: "a result that shares memory with an input, another result or a cache",
}
WAYS = (HERE, OTHER, OTHER, HERE, NEW, HERE)
COUNTED, MOST_THREADS = (2, 1, 3), 24  # then one random number from 4 to 24, a large server's core complex
QUEUE, PASSES = 2, 500  # sets of operands for each of two threads; most passes over them
AT_ONCE_S, AT_ONCE_BYTES = 0.05, 64 << 20  # limits for the time of these calls and for the memory of their outputs


class Calls:
    """The callers' checks of one build, on a plain case and on the largest one."""

    def __init__(self, battery: Battery, plain: Case, large: Case) -> None:
        self.battery, self.plain, self.large = battery, plain, large
        self.session, self.candidate = battery.session, battery.proof.candidate

    def checks(self) -> dict[str, Callable[[Tally], None]]:
        found: dict[str, Callable[[Tally], None]] = {THREADS: self._threads, STORAGE: self._storage}
        if not self.candidate.static_shapes:  # these candidates would compile again for each number of threads
            found[COUNTS] = self._counts
        if self.candidate.backend not in devices.named(self.session.device).interpreted:
            found[AT_ONCE] = self._at_once
        if not self.candidate.writes_out:
            found[OWNED] = self._owned
        return found

    def _threads(self, tally: Tally) -> None:
        """Check new contents at the same addresses, from one thread, then from another."""
        here = self.battery.first(self.plain)
        for number, way in enumerate(self._ways()):
            inputs = self.plain.make(self.battery.seed(f"{THREADS} {number}"))
            here.renew(inputs)
            try:
                self._judged(here, inputs, THREADS, tally, way=way)
            except RefusedError as refused:
                check = "inference_mode" if way == INFERENCE else "other_thread"
                raise _renamed(refused, check, f"in {way or 'the first thread again'}, ") from None

    def _ways(self) -> Sequence[str]:
        """Leave out inference mode for candidates that compile for each shape: they would compile again for it."""
        return WAYS if self.candidate.static_shapes else (*WAYS, INFERENCE)

    def _counts(self, tally: Tally) -> None:
        """Check calls with other numbers of PyTorch threads, and other work in between."""
        try:
            for count in (*COUNTED, 4 + self.battery.seed(COUNTS) % (MOST_THREADS - 3)):
                self.session.use_threads(count, served=True)
                for case in dict.fromkeys((self.large, self.plain)):
                    inputs = case.make(self.battery.seed(f"{COUNTS} {count}"))
                    self._judged(self.battery.place(case, inputs, side=0), inputs, COUNTS, tally)
        except RefusedError as refused:
            raise _renamed(refused, "thread_count", f"with {count} threads, ") from None
        finally:
            if self.session.worker.exit is None:
                self.session.use_threads()

    def _storage(self, tally: Tally) -> None:
        """Check that operands give the same result as separate tensors and as views of one storage."""
        here = self.battery.first(self.plain)
        expected = self.battery.call(here, STORAGE, fill="none")
        got = self.battery.call(here, STORAGE, fill="none", way=ONE_STORAGE)
        if not self.battery.agree(expected, got, here.inputs):
            reason = "views of one storage give a different result than tensors with separate storage"
            raise RefusedError("one_storage", STORAGE, reason, {})
        self._one_for_two(tally)

    def _one_for_two(self, tally: Tally) -> None:
        """Check calls that pass one tensor for two operands of the same shape and dtype."""
        inputs = self.plain.make(self.battery.seed("habits 1"))
        for one, other in combinations(self._contents(inputs), 2):
            if inputs[one].shape == inputs[other].shape and inputs[one].dtype == inputs[other].dtype:
                shared = {**inputs, other: inputs[one]}
                try:
                    self._judged(self.battery.place(self.plain, shared), shared, STORAGE, tally)
                except RefusedError as refused:
                    where = f"with one tensor for {one} and {other}, "
                    raise _renamed(refused, "one_storage", where) from None

    def _contents(self, inputs: Inputs) -> list[str]:
        """Return the names of operands that are only read and hold numbers."""
        domains = self.battery.op.domains
        read = [a.name for a in self.battery.op.args if a.role != "inout" and isinstance(inputs[a.name], Tensor)]
        return [name for name in read if name in domains and domains[name].kind == "content"]

    def _at_once(self, _: Tally) -> None:
        """Check calls from two threads at the same time: each must give the result of a call alone, or a correct one.

        Results may differ in rounding, because a library may use fewer threads, and so another order of sums, while its
        threads are busy.
        """
        placed = self._queues()
        expected = [self.battery.call(one, AT_ONCE, fill="none", skip=self._streamed) for one in placed]
        passes = self._passes(placed)
        try:
            self.session.use_threads(served=True)
            got = self.session.call_at_once(self.battery.name, self.battery.proof, placed, AT_ONCE, passes)
        finally:
            if self.session.worker.exit is None:
                self.session.use_threads()
        self._compare(placed, expected, got)

    def _queues(self) -> list[Placed]:
        """Return operands for QUEUE calls of each of two threads; streamed operands are shared."""
        placed = [self.battery.first(self.large)]
        for number in range(1, 2 * QUEUE):
            other = self.large.make(self.battery.seed(f"{AT_ONCE} {number}"))
            inputs = {n: placed[0].inputs[n] if n in self._streamed else v for n, v in other.items()}
            one = place(placed[0].arena, self.battery.op, self.large.workload, inputs, share=placed[0])
            placed.append(one)
        return placed

    def _passes(self, placed: Sequence[Placed]) -> int:
        """Return how often both queues run, as far as time and memory for outputs allow."""
        once_s = max(1e-6, self.session.last_call_ns * 1e-9)
        outputs = sum(result.nbytes for result in placed[0].results())
        return max(2, min(int(AT_ONCE_S / (QUEUE * once_s)), AT_ONCE_BYTES // (2 * QUEUE * max(1, outputs)), PASSES))

    @property
    def _streamed(self) -> list[str]:
        return [a.name for a in self.battery.op.args if a.role == "streamed"]

    def _compare(
        self, placed: Sequence[Placed], expected: Sequence[Sequence[Tensor]], got: Sequence[Sequence[Tensor]]
    ) -> None:
        wrong = [
            number
            for number, one in enumerate(placed)
            if not self.battery.agree(expected[number], got[number], one.inputs)
            and not self._right(one.inputs, got[number])
        ]
        if wrong:
            reason = f"{len(wrong)} of {len(placed)} calls give a wrong result while another thread calls the candidate"
            raise RefusedError("at_once", AT_ONCE, reason, {"calls": len(placed), "wrong": len(wrong)})

    def _right(self, inputs: Inputs, got: Sequence[Tensor]) -> bool:
        try:
            self.battery.accept(AT_ONCE, inputs, got, Tally())
        except RefusedError:
            return False
        return True

    def _owned(self, _: Tally) -> None:
        """Overwrite the results with numbers: inputs, other results and the result of a later call must not change."""
        here = self.battery.first(self.plain)
        expected = self.battery.call(here, OWNED, fill="none", hold=OWNED)
        now = self.session.dump(OWNED, self.battery.proof, here, overwritten=True)
        for number, result in enumerate(now, 1):
            if not torch.equal(result, torch.full_like(result, number)):
                raise RefusedError("aliasing", OWNED, "two results share memory", {"output": number - 1})
        damage = here.damage()
        if damage is not None:
            reason = f"a result shares an input's memory: {damage.reason}"
            raise RefusedError("aliasing", OWNED, reason, damage.evidence)
        if not self.battery.agree(expected, self.battery.call(here, OWNED, fill="none"), here.inputs):
            reason = "a caller's write to an earlier result shows in a later one"
            raise RefusedError("aliasing", OWNED, reason, {})

    def _judged(self, here: Placed, inputs: Inputs, case: str, tally: Tally, way: str = HERE) -> None:
        self.battery.accept(case, inputs, self.battery.call(here, case, fill="none", way=way), tally)


def _renamed(refused: RefusedError, check: str, where: str) -> RefusedError:
    return RefusedError(check, refused.case, f"{where}{refused.reason}", refused.evidence)
