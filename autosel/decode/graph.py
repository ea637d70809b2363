"""The step as a CUDA graph: the list of calls, captured once and replayed.

A graph holds the numbers of its capture, among them the context length. If that changes, or a decision no longer serves
(`dispatch.epoch`), the list is captured again. An advancing stream would need a capture for every token, so it runs
call by call. Status: not yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autosel import devices, dispatch
from autosel.decode.run import Plan
from autosel.decode.step import Rewritten, Step
from autosel.devices.device import UncapturableError
from autosel.errors import UsageError
from autosel.values import Accepted, Rejected, Support

Run = Callable[[], None]


def supports(plan: Plan) -> Support:
    """Return whether the plan's steps can be replayed. Call it before weights are loaded."""
    if not devices.named(plan.device).captures:
        return Rejected(reason="graphs are captured on a GPU")
    if plan.advance:
        return Rejected(reason="--advance: a graph holds one context length, which grows with every step of the stream")
    if not plan.prealloc:
        return Rejected(reason="--no-prealloc: a graph writes into preallocated buffers")
    return Accepted()


@dataclass(slots=True, kw_only=True)
class GraphStep(Rewritten):
    """One decode step by one replay; `ops` is its list of calls, which holds place, cache and buffers."""

    replay: Run
    length: int  # at the capture
    epoch: int

    @staticmethod
    def of(ops: Step) -> GraphStep:
        """Capture the list. Raises UsageError if it cannot be captured."""
        return GraphStep(ops=ops, replay=captured(ops), length=ops.place.longest, epoch=dispatch.epoch())

    def run(self) -> None:
        if self.place.longest != self.length or dispatch.epoch() != self.epoch:
            self.length, self.epoch = self.place.longest, dispatch.epoch()
            self.replay = captured(self.ops)
        self.replay()

    def settle(self) -> None:
        self.ops.settle()


def captured(ops: Step) -> Run:
    """Return a replay of the list at its current length. A step leaves its place unchanged, so it may run before the
    capture.

    autosel's kernels are captured as programmatic dependents of the previous kernel: graph edges that let them start
    early.
    """

    def run(count: int) -> None:
        for _ in range(count):
            ops.run_chained()

    try:
        replay: Run = devices.of(ops.logits).captured(run, 1).replay
        return replay
    except UncapturableError as error:
        todo = "use --step ops: the step then runs call by call"
        raise UsageError("the step cannot be captured as a graph", why=str(error)[:300], todo=todo) from error
