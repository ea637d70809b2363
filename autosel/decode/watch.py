"""The guard of a thread team's steps: a step stops after a few of its tasks, and their results are checked.

    watch = StepWatch(policy=..., allowance=..., decision=decision, report=board.report)
    watch.run(step)          # instead of step.through()

The tasks are drawn again for each step, so that every layer is checked at times. A suspicion (spot.py) is judged by the
step op by op up to the same task, on the same inputs. If that passes, the team runs three more times and is demoted;
the step is then served op by op.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random, SystemRandom
from typing import Protocol

from autosel.decode.step import Step
from autosel.guard import Allowance, Policy
from autosel.ledger.faults import Cause, Fault
from autosel.values import Decision

log = logging.getLogger(__name__)
Check = Callable[[int], float]  # seed -> largest |got - expected| / tolerance
SUSPECT = 2.0  # a check's tolerance is a first-order estimate
REPLAYS = 3
# Cost of a stop: a second wake-up of the team, and weights that are not prefetched (bench_guard_faults.py).
STOP_NS = 20_000
SHARE = 0.0027  # share of the time for checks of steps: no other guard runs with them


class Stopping(Protocol):
    """A whole step that can stop after any of its tasks."""

    ops: Step
    candidate: str

    @property
    def checks(self) -> Sequence[Check | None]:
        """Return one check for each task, or None."""

    def part(self, begin: int, end: int) -> None:
        """Run only these tasks."""

    def through(self) -> None:
        """Run all tasks."""

    def list_through(self, task: int) -> None:
        """Run the step op by op, up to the calls of a task."""


@dataclass(slots=True, kw_only=True)
class StepWatch:
    """Guard of one step. Faults are recorded only with `decision`, by which the team serves. `report` receives them."""

    policy: Policy
    allowance: Allowance
    decision: Decision | None
    report: Callable[[Fault], None]
    random: Random = field(default_factory=SystemRandom)
    clock: Callable[[], int] = time.perf_counter_ns
    checks: int = 0
    typical_ns: float = 2 * STOP_NS  # of a check with its stop
    limit: float = SUSPECT  # increases with each unconfirmed suspicion
    fault: str = ""  # why the step runs op by op

    def run(self, step: Stopping) -> bool:
        """Run the step. Return False if it ran op by op from first to last call."""
        if self.fault:
            step.ops.run()
            return False
        begin = 0
        for task in self._drawn(step):
            step.part(begin, task + 1)
            begin = task + 1
            if not self._right(step, task):
                step.ops.run()
                return False
        if begin:
            step.part(begin, len(step.checks))
        else:
            step.through()
        return True

    def _drawn(self, step: Stopping) -> list[int]:
        """Return the tasks after which this step stops, each with the probability of spot checks, within the allowance.

        The allowance is used in random order, so that no task is always left out when it is short.
        """
        due = [task for task in self._due(len(step.checks)) if step.checks[task] is not None]
        self.random.shuffle(due)
        granted = []
        for task in due:
            if not self.allowance.may():
                break
            self.allowance.spend(self.typical_ns)
            granted.append(task)
        return sorted(granted)

    def _due(self, count: int) -> list[int]:
        rate = self.policy.spot_rate
        if rate >= 1.0:
            return list(range(count))
        found, task = [], -1
        while rate > 0.0 and (task := task + 1 + int(math.log(1.0 - self.random.random()) / math.log1p(-rate))) < count:
            found.append(task)
        return found

    def _right(self, step: Stopping, task: int) -> bool:
        """Return False if the task's results are wrong."""
        check, seed, start = step.checks[task], self.random.getrandbits(60), self.clock()
        assert check is not None
        ratio = check(seed)
        right = ratio <= self.limit or self._cleared(step, task, check, seed, ratio)
        self.checks += 1
        took_ns = self.clock() - start + STOP_NS
        self.allowance.spend(took_ns - self.typical_ns)
        self.typical_ns += (took_ns - self.typical_ns) / 16
        return right

    def _cleared(self, step: Stopping, task: int, check: Check, seed: int, ratio: float) -> bool:
        """Judge a suspected task by the step op by op. If that fails as well, the tolerance does not fit the inputs."""
        step.list_through(task)
        control = check(seed)
        again = [self._again(step, task, check, seed) for _ in range(REPLAYS)]
        if control <= self.limit / 2:
            self._blame(step, task, ratio, control, again)
            return False
        if math.isfinite(ratio) and math.isfinite(control):
            self.limit = max(self.limit, 2 * ratio, 2 * control)
        return True

    def _again(self, step: Stopping, task: int, check: Check, seed: int) -> float:
        """Run the team again up to the task, into the same buffers, and check it."""
        step.part(0, task + 1)
        return check(seed)

    def _blame(self, step: Stopping, task: int, ratio: float, control: float, again: Sequence[float]) -> None:
        wrong = sum(other > self.limit for other in again)
        cause: Cause = "kernel" if wrong == REPLAYS else "race"
        what = f"the error of task {task} of {len(step.checks)} is {ratio:.3g} times its limit"
        told = f"the step op by op reaches {control:.2g} times; wrong in {wrong} of {REPLAYS} replays"
        self.fault = f"wrong in service: {what}, {told}"
        if self.decision is None:
            log.error("%s no longer serves the step: %s", step.candidate, self.fault)
            return
        evidence = {"task": task, "tasks": len(step.checks), "ratio": ratio, "control": control, "replays": list(again)}
        self.report(
            Fault(
                cause=cause,
                reason=self.fault,
                decision=self.decision,
                workload=self.decision.workload.key,
                evidence={**evidence, "checks_before": self.checks},
                seen_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            )
        )
