"""A race of whole steps, and its timer: steps are timed in this process, where their weights are.

The rules are the same as in every race (race.run). The difference is where sessions run: all arms share the weights,
which take gigabytes, so that their placement in memory favours none. Each session makes an arm's buffers, program and
graph again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autosel import devices
from autosel.decode.account import saved_bytes
from autosel.decode.hold import blame, control_fault
from autosel.decode.persistent import AnyStep, write
from autosel.decode.question import OPS, Question, form_of
from autosel.decode.run import Chain
from autosel.decode.scene import Scene
from autosel.decode.step import Step
from autosel.devices.cpu.idle import wait_until_idle
from autosel.errors import DeviceFault
from autosel.ledger.commands import Spend
from autosel.ledger.key import budget_key
from autosel.ledger.store import Ledger
from autosel.models.cost import bytes_per_step
from autosel.ops.contract import Mismatch
from autosel.race.bench import Disturbance
from autosel.race.contest import COLD_OVER_LLC, Contest, Entrant
from autosel.race.plan import Margin, TrialPlan, plan
from autosel.race.run import Disqualified, RaceTerms, Tick, run
from autosel.race.session import BUSY
from autosel.race.waits import WaitWatch, read_rate, watch
from autosel.tuning.contend import TIME_CLASSES, last_level_bytes
from autosel.values import WHOLE_STEP, Arm, Deployed, Prepared, Race

# The smallest gain that can be promoted. It is below an op's own (2 %), because the arms of a step share most of what
# varies between processes. Of 49 A/A sessions (llama-1b, 4 layers and 1, the step written twice; 24 pairs; 30 of them
# while other work ran) one crossed: with 95 % confidence fewer than one in ten do.
MARGIN = Margin(delta=0.01, alpha_session=0.05, pi=0.1, calibrated=True)
# The longest time that a race of steps may continue for its tail only: for a step of 50 ms, 200 samples of each arm.
TAIL_S = 20.0
BASELINE_SAMPLES = 3  # samples from which the plan is made


def race_of(steps: Steps, question: Question, challengers: Sequence[Arm]) -> Race:
    """Race the challengers against the step op by op, in this process. Raises EnvironmentFault."""
    scene, ledger = steps.scene, steps.ledger

    def debit(contest: Contest, candidate: str, allowed: Margin) -> bool:
        assert ledger is not None
        key = budget_key(scene.fp.hw_id, contest.workload)
        return ledger.write(Spend(key=key, amount=allowed.false_promotion_bound, reason=candidate))

    def progress(tick: Tick) -> None:
        scene.listener.stage("step", f"{tick.stage}, {tick.pairs} pairs of whole steps", 0, 1)

    baseline = _entrant(question.arms["ops"])
    contest = Contest(
        workload=question.workload,
        baseline=baseline,
        incumbent=baseline,
        challengers=tuple(map(_entrant, challengers)),
        margins=dict.fromkeys(TIME_CLASSES, MARGIN),
        llc_bytes=last_level_bytes(scene.fp),
        read_bytes_per_s=math.inf,  # a step faster than the probe is as uncertain as the probe
    )
    for found in run([contest], RaceTerms(rng=scene.rng, debit=debit, progress=progress), steps):
        if not isinstance(found, Disqualified):
            race = found[1]
            return replace(race, notes=(*filter(None, [steps.told]), *race.notes))
    raise AssertionError("a race ends with its Race")


def _entrant(arm: Arm) -> Entrant:
    return Entrant(
        candidate=arm.candidate,
        op=WHOLE_STEP,
        recipe=arm.recipe,
        digest=arm.digest,
        knobs=arm.knobs,
        writes_out=True,
    )


@dataclass(slots=True, kw_only=True)
class Steps:
    """Sessions of the scene's step in this process: a `Venue`, and each of its rooms.

    `arms` are the ledger's names of the candidates. A fault that the control does not share puts an arm in quarantine.

    `moved` has the bytes of a step by candidate; `told` describes the packing of its weights.
    """

    scene: Scene
    chain: Chain
    arms: Mapping[str, Arm]
    ledger: Ledger | None = None
    moved: dict[str, int] = field(default_factory=dict)
    told: str = ""

    def room(self) -> Steps:
        return self

    def seat(self, contest: Contest, arms: Sequence[str], plan: TrialPlan | None) -> StepSeat:
        return StepSeat(self, arms, plan)

    def renew(self) -> None:
        """Do nothing: each session writes its steps again."""

    def close(self) -> None:
        """Do nothing: sessions share no state."""

    def written(self, candidate: str) -> AnyStep:
        scene, form = self.scene, form_of(candidate)
        step = write(scene.decoder, scene.cache, scene.place, self.chain, form=form, fp=scene.fp)
        plain = bytes_per_step(scene.plan.shape, scene.plan.dtype, scene.plan.batch, scene.place.longest)
        self.moved[candidate] = plain - saved_bytes(step)
        self.told = getattr(step, "weights_told", "") or self.told
        return step


class StepSeat:
    """The arms of one session: a `Seat`."""

    failures: tuple[type[Exception], ...] = (DeviceFault, torch.AcceleratorError)

    def __init__(self, steps: Steps, arms: Sequence[str], plan: TrialPlan | None) -> None:
        self.steps, self.arms, self.plan = steps, list(arms), plan
        device = devices.named(steps.scene.plan.device)
        self.timer = device.timer(steps.scene.clock)
        self.cache_bytes = last_level_bytes(steps.scene.fp)
        self.written: dict[str, AnyStep] = {}
        self.runs = OPS  # the current arm
        self.watch: WaitWatch | None = watch() if device.on_host else None

    def sit(self) -> None:
        """Write each step and run it once; make the plan from the time of the step op by op."""
        for arm in self.arms:
            self.runs = arm
            self.written[arm] = self.steps.written(arm)
            self.written[arm].run()
            self.written[arm].settle()
        if self.plan is None:
            self._wake(OPS)
            base_ns = statistics.median(self._sample(OPS, 1) for _ in range(BASELINE_SAMPLES))
            self.plan = _affordable(plan(base_ns), base_ns)

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        """Time a pair. Steps during which a thread waited for a core are repeated, as samples of ops are."""
        before, busy = Disturbance.read(), ""
        if self.watch is not None:
            self.watch.begin()
        times: dict[str, list[float]] = {}
        for arm in order:
            times[arm] = [] if busy else self._visit(arm, calls, samples)
            busy = "" if len(times[arm]) == samples else BUSY
        return times, busy or before.since()

    def _visit(self, arm: str, calls: int, samples: int) -> list[float]:
        if self.plan is None or self.plan.wakes:
            self._wake(arm)
        if self.watch is None:
            return [self._sample(arm, calls) for _ in range(samples)]
        return self.watch.samples(lambda: self._sample(arm, calls), samples, lambda: None)

    def _wake(self, arm: str) -> None:
        step, self.runs = self.written[arm], arm
        wait_until_idle()
        step.run()
        step.settle()

    def _sample(self, arm: str, calls: int) -> float:
        """Return nanoseconds per step, by the clock that certifies steps."""
        self.runs = arm
        wait_until_idle()  # PyTorch's threads that still poll for work would use these cores
        return self.timer.mean_ns(self.written[arm], calls)

    @property
    def again(self) -> int:
        return self.watch.again if self.watch is not None else 0

    @property
    def watched(self) -> bool:
        return self.watch is None or self.watch.waits.watched

    @property
    def prepared(self) -> dict[str, Prepared]:
        found = {arm: getattr(step, "prepared", None) for arm, step in self.written.items()}
        return {arm: took for arm, took in found.items() if took is not None}

    @property
    def checked(self) -> Mapping[str, tuple[int, int]]:
        """Return nothing: steps are compared in their proofs, not while they are timed."""
        return {}

    def probe(self) -> float:
        self.runs = OPS
        return read_rate(devices.named(self.steps.scene.plan.device).read_windows, self.watch)

    def deployed(self, arms: Sequence[str]) -> tuple[Deployed, ...]:
        """Return no situations: a step is the whole program."""
        return ()

    def moved_bytes(self, arm: str) -> int:
        """Return the bytes that a step must read from memory: all but what the last step may have left in the cache."""
        moved = self.steps.moved[arm]
        return moved - self.cache_bytes if moved > COLD_OVER_LLC * self.cache_bytes else 0

    def blame(self, error: Exception) -> dict[str, Mismatch]:
        """Blame the step that ran when the device failed, if the step op by op works right after."""
        control = self.written.get(OPS)
        if self.runs == OPS or not isinstance(control, Step):
            raise control_fault(str(error)[:300]) from error
        fault = blame(self.steps.ledger, self.steps.scene.fp, control, self.steps.arms[self.runs], error)
        return {self.runs: Mismatch(check="crash", reason=f"{fault.what}: {fault.why}", evidence={})}

    def release(self) -> None:
        self.written.clear()
        if self.watch is not None:
            self.watch.waits.close()


def _affordable(found: TrialPlan, base_ns: float) -> TrialPlan:
    """Limit the tail's samples to TAIL_S; a tail that they do not settle stays unsettled."""
    return replace(found, tail_samples=min(found.tail_samples, max(1, int(TAIL_S * 1e9 / (2 * base_ns)))))
