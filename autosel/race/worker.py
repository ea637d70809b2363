"""The worker instrument: arms are loaded, timed and checked in a separate process, a fresh one for each stage.

All workloads of a stage share its process: four process starts whatever the number of workloads. If a process dies,
only its session is lost; running each challenger alone finds the culprit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from torch import Tensor

from autosel import devices
from autosel.candidates.control import empties
from autosel.errors import BuildError, WorkerError
from autosel.ops.contract import Mismatch
from autosel.race.contest import Contest, Entrant, SharedOperands, empty_entrant
from autosel.race.deployed import turns
from autosel.race.drawn import kept_of, slots_for
from autosel.race.judge import CLONE
from autosel.race.kept import Kept
from autosel.race.plan import TimeClass, TrialPlan, plan
from autosel.values import Deployed, Prepared, to_json
from autosel.workers.arena import Ref
from autosel.workers.environment import control_fault
from autosel.workers.process import Worker

WARM_NS = 100_000_000
# One contest of each time class carries the A/A comparison of a session, drawn by coin from those where it is cheap: it
# must continue as long as a confirming session may, whatever the others need.
CLONE_LIMIT_NS = 3_000_000
CLONE_LIMIT_BYTES, CLONE_LIMIT_BYTES_ELSEWHERE = 256 << 20, 1 << 30  # cooling copies on a GPU takes longer
CLONE_SHARE = 0.3
LOAD_S, PREPARE_S = 60.0, 120.0
SLOWER = 10  # most times slower than the baseline's first call, on a machine that also does other work
CHECK_SHARE = 0.1  # of the pairs after the first, by coin: any sample's output may be checked


# --- replies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """A worker's reply to `prepare`: the cost of preparing one call's weights by arm, for arms with a layout."""

    prepared: Mapping[str, Prepared]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """A worker's reply to `warm`: nanoseconds per call, by arm."""

    ns: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A worker's reply to `pair`: the samples by arm, and why they must be dropped or "".

    `again`: samples repeated so far; `watched`: the system reports when a thread waits for a core; `kept`: copied
    results of timed calls by arm.
    """

    ns: Mapping[str, tuple[float, ...]]
    disturbed: str
    again: int = 0
    watched: bool = False
    kept: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedTimes:
    """A worker's reply to `deployed`: nanoseconds of one call by arm, for each turn."""

    ns: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A worker's reply to `probe`."""

    bytes_per_s: float


# --- processes and seats ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Opens a process for each stage of a race."""

    threads: int
    rng: Random
    device: str = devices.HOST
    realtime: bool = False  # samples are repeated at real-time priority
    shelf: dict[str, SharedOperands] = field(default_factory=dict)  # by workload, drawn once

    def room(self) -> RaceProcess:
        return RaceProcess(self)

    def operands(self, contest: Contest) -> SharedOperands:
        """Return the contest's operands, kept until the race is over."""
        key = contest.workload.key
        if key not in self.shelf:
            seed, least = self.rng.getrandbits(31), contest.least_share
            self.shelf[key] = SharedOperands(contest.workload, seed, contest.llc_bytes, least_share=least)
        return self.shelf[key]

    def close(self) -> None:
        for operands in self.shelf.values():
            operands.close()
        self.shelf.clear()


class RaceProcess:
    """A race worker that is replaced after a void or a death; remembers what it has loaded."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.device = workers, workers.device
        self.on_host = devices.named(workers.device).on_host
        self.worker: Worker | None = None
        self.loaded: set[str] = set()
        self.cloned: set[TimeClass] = set()  # classes whose A/A comparison this process has carried

    def seat(self, contest: Contest, arms: Sequence[str], plan: TrialPlan | None) -> WorkerSeat:
        return WorkerSeat(self, contest, arms, plan)

    def get(self) -> Worker:
        if self.worker is None:
            self.worker = Worker("autosel.race.child:serve", threads=self.workers.threads)
            self.loaded = set()
        return self.worker

    def load(self, entrant: Entrant) -> None:
        worker = self.get()
        if entrant.loaded_name in self.loaded:
            return
        request = {"do": "load", "entrant": to_json(entrant), "device": self.device, "owner": os.getpid()}
        request["realtime"] = self.workers.realtime
        worker.request(request, deadline_s=LOAD_S)
        self.loaded.add(entrant.loaded_name)

    def find_culprit(self, seat: WorkerSeat) -> dict[str, Mismatch]:
        """Run each challenger alone with the baseline; one that ends its process again is the culprit, if the control
        works.

        Raises EnvironmentFault if the control fails.
        """
        self.renew()
        found: dict[str, Mismatch] = {}
        base = seat.arms[0]
        for arm in (a for a in seat.arms if a not in (base, CLONE)):
            alone = WorkerSeat(self, seat.contest, [base, arm], seat.plan)
            try:
                alone.sit()
                assert alone.plan is not None
                for _ in range(3):
                    alone.pair([base, arm], alone.plan.calls, alone.plan.samples)
                alone.release()
            except (WorkerError, _WrongOutputError) as again:
                if isinstance(again, WorkerError) and again.retryable:
                    self.renew()  # memory ran out, perhaps because of another arm
                    continue
                cause = again.cause if isinstance(again, WorkerError) else "wrong output"
                found[arm] = Mismatch(check="crash", reason=f"{again} ({cause})", evidence={"cause": cause})
                self.renew()
        if found:
            self._require_control(seat.contest, found)
        return found

    def _require_control(self, contest: Contest, fallen: Collection[str]) -> None:
        """Call the baseline and an empty candidate, loaded like the crashed arms, in a new process.

        Raises EnvironmentFault if this process also crashes.
        """
        base = contest.baseline.candidate
        for empty in empties(contest.workload.op, [contest.entrants[arm].recipe for arm in fallen]):
            try:
                alone = replace(contest, challengers=(empty_entrant(empty),))
                control = WorkerSeat(self, alone, [base, empty.name], None)
                control.sit()
                control.release()
            except (WorkerError, BuildError) as error:
                raise control_fault(f"{base} beside {empty.name}", error, ", ".join(fallen)) from error
        self.renew()

    def renew(self) -> None:
        self.close()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        self.loaded = set()


class _WrongOutputError(Exception):
    def __init__(self, arm: str, mismatch: Mismatch) -> None:
        super().__init__(f"{arm} gave a wrong result while racing: {mismatch.reason}")
        self.arm, self.mismatch = arm, mismatch


class WorkerSeat:
    """Some arms of one contest seated in a worker: a `Seat`."""

    failures: tuple[type[Exception], ...] = (_WrongOutputError, WorkerError)

    def __init__(self, process: RaceProcess, contest: Contest, arms: Sequence[str], plan: TrialPlan | None) -> None:
        self.process, self.contest, self.rng = process, contest, process.workers.rng
        self.arms, self.plan = list(arms), plan
        self.pairs = 0
        self.base_ns = 0.0  # of one call of the baseline
        self.again, self.watched = 0, False
        self.prepared: Mapping[str, Prepared] = {}
        self.kept = Kept()
        self.seed = 0  # of the last pair's contents
        self.last: dict[str, Sequence[Tensor]] = {}  # results of the last pair's last calls, by arm

    @property
    def operands(self) -> SharedOperands:
        return self.process.workers.operands(self.contest)

    def sit(self) -> None:
        """Load, copy the operands, warm up; plan from the baseline's time."""
        entrants = self.contest.entrants
        for arm in self.arms:
            self.process.load(entrants[arm])
        worker = self.process.get()
        worker.attach(self.operands.arena)
        self._prepare(worker)
        base_ns = worker.told(Warmed, {"do": "warm", "limit_ns": WARM_NS}, PREPARE_S).ns.get(self.arms[0], 0.0)
        self.base_ns = base_ns
        if base_ns <= 0:
            raise WorkerError(f"the worker reports {base_ns:g} ns for the baseline", cause="protocol")
        self.plan = self.plan or plan(base_ns)
        if self._carries_clone(base_ns, self.plan.time_class):
            self.arms.append(CLONE)
            self.process.cloned.add(self.plan.time_class)
            self._prepare(worker)
            worker.request({"do": "warm", "limit_ns": WARM_NS // 4}, deadline_s=PREPARE_S)

    def _carries_clone(self, base_ns: float, time_class: TimeClass) -> bool:
        size = self.operands.streamed_bytes * self.operands.copies
        wanted = time_class not in self.process.cloned and self.rng.random() < CLONE_SHARE
        limit = CLONE_LIMIT_BYTES if self.process.on_host else CLONE_LIMIT_BYTES_ELSEWHERE
        return wanted and base_ns <= CLONE_LIMIT_NS and size <= limit

    def _prepare(self, worker: Worker) -> None:
        contest, operands = self.contest, self.operands
        names = {arm: contest.entrants[self.arms[0] if arm == CLONE else arm].loaded_name for arm in self.arms}
        request = {
            "do": "prepare",
            "workload": to_json(contest.workload),
            "inputs": to_json(operands.refs),
            "arms": names,
            "copies": operands.copies,
            "slots": self.slots,
        }
        self.prepared = worker.told(Seated, request, PREPARE_S).prepared

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        """Take one pair on fresh resident operands; sometimes check its outputs here. Raises _WrongOutputError."""
        operands, plan = self.operands, self.plan
        assert plan is not None
        seed = self.rng.getrandbits(31)
        checked = self.pairs == 0 or self.rng.random() < CHECK_SHARE
        self.pairs += 1
        self.seed = seed
        places = self._places(order, calls, samples)
        request = {
            "do": "pair",
            "order": list(order),
            "calls": calls,
            "samples": samples,
            "wake": plan.wakes,
            "resident": to_json(operands.refresh(seed)),
            "outputs": {a: to_json(operands.places(a)) for a in order if a != CLONE} if checked else {},
            "kept": {a: to_json(found) for a, found in places.items()},
            "draw": self.rng.getrandbits(62),
        }
        started = time.perf_counter_ns()
        allowed_s = PREPARE_S + SLOWER * self.base_ns * 1e-9 * calls * samples * len(order)
        taken = self.process.get().told(Taken, request, allowed_s)
        wall_ns = time.perf_counter_ns() - started
        whole = all(len(ns) == samples for ns in taken.ns.values())
        if set(taken.ns) != set(order) or not (whole or taken.disturbed):
            raise WorkerError("other samples came than were asked for", cause="protocol")
        self.again += taken.again
        self.watched = taken.watched
        self._bound_claims(taken.ns, calls, wall_ns)
        if checked:
            self._check(order, seed)
        self._compare(places, taken, calls)
        return taken.ns, taken.disturbed

    @property
    def checked(self) -> Mapping[str, tuple[int, int]]:
        return self.kept.counts

    @property
    def slots(self) -> int:
        return slots_for(self.operands.output_bytes) if self.process.on_host else 1

    def _places(self, order: Sequence[str], calls: int, samples: int) -> dict[str, list[list[tuple[Ref, ...]]]]:
        """Return, for each arm and sample, the memory for the results of its kept calls."""
        found = {}
        for arm in (a for a in order if a != CLONE):
            for each in (kept_of(calls, self.slots), 1):
                places = self.operands.kept(arm, each * samples)
                if len(places) == each * samples:
                    found[arm] = [places[i * each : (i + 1) * each] for i in range(samples)]
                    break
        return found

    def _compare(self, places: Mapping[str, list[list[tuple[Ref, ...]]]], taken: Taken, calls: int) -> None:
        """Compare the results of timed calls in full. Raises _WrongOutputError."""
        base: Sequence[Tensor] | None = None
        self.last = {}
        for arm in (a for a in self.arms if a in taken.ns and a != CLONE):
            kept = [self.operands.tensors(p) for one in places.get(arm, ()) for p in one][: taken.kept.get(arm, 0)]
            self.kept.add(arm, timed=calls * len(taken.ns[arm]), checked=len(kept))
            if not kept:
                continue
            self.last[arm] = kept[-1]
            odd = self.kept.odd(arm, kept)
            if odd is not None:
                raise _WrongOutputError(arm, odd)
            if base is None and arm == self.arms[0]:
                base = kept[0]
            elif base is not None and self.kept.stray(kept[0], base):
                self._check_rows(arm, kept[0])

    def _check_rows(self, arm: str, got: Sequence[Tensor]) -> None:
        mismatch = self.operands.check(got, self.seed)
        if mismatch is not None:
            raise _WrongOutputError(arm, mismatch)

    def _bound_claims(self, times: Mapping[str, Sequence[float]], calls: int, wall_ns: int) -> None:
        """Check the claimed times against the wall time that this process measured.

        The ceiling, and the share of wall time that no arm accounts for, catch a clock patched in the other direction.
        """
        claimed = sum(sum(ns) for ns in times.values()) * calls
        if claimed > wall_ns or any(t <= 0 for ns in times.values() for t in ns):
            raise WorkerError(f"samples of {claimed:.0f} ns in {wall_ns} ns of wall time", cause="clock")

    def _check(self, order: Sequence[str], seed: int) -> None:
        for arm in (a for a in order if a != CLONE):
            self._check_rows(arm, self.operands.tensors(self.operands.places(arm)))
            if not self.operands.output_bytes:
                self.kept.add(arm, timed=0, checked=1)
        if not self.kept.bound:
            self.kept.bound = self.operands.largest_bounds(seed)

    def _check_last(self) -> None:
        """Judge the last timed call of each kept arm, before its operands are released."""
        for arm, last in self.last.items():
            self._check_rows(arm, last)

    def deployed(self, arms: Sequence[str]) -> tuple[Deployed, ...]:
        """Time single calls in the situations of a program; empty for long calls or on a GPU."""
        if not self.process.on_host or self.plan is None or self.plan.time_class == "long":
            return ()
        asked = turns(arms, self.rng)
        calls = self.process.get().told(DeployedTimes, {"do": "deployed", "turns": asked}, PREPARE_S).ns
        if len(calls) != len(asked) or any(ns <= 0 for one in calls for ns in one.values()):
            raise WorkerError("other calls came than were asked for", cause="protocol")
        found: dict[str, list[tuple[float, ...]]] = {situation: [] for situation, _ in asked}
        for (situation, _), ns in zip(asked, calls, strict=True):
            if set(ns) == set(arms):
                found[situation].append(tuple(ns[arm] for arm in arms))
        return tuple(Deployed(situation=s, turns_ns=tuple(of)) for s, of in found.items() if of)

    def probe(self) -> float:
        if not self.operands.is_cold:
            return 0.0
        return self.process.get().told(Probed, {"do": "probe"}, PREPARE_S).bytes_per_s

    def moved_bytes(self, arm: str) -> int:
        """Return the bytes that a call must read with the smallest layout, whatever the arm's process reports."""
        layout = self.contest.entrants[self.arms[0] if arm == CLONE else arm].recipe.layout
        return self.operands.read_bytes - (self.operands.least_saved(layout) if layout else 0)

    def blame(self, error: Exception) -> dict[str, Mismatch]:
        """Return the arms that gave a wrong result, or the challengers that end a worker alone."""
        if isinstance(error, _WrongOutputError):
            return {error.arm: error.mismatch}
        return self.process.find_culprit(self)

    def release(self) -> None:
        self._check_last()
        worker = self.process.get()
        worker.request({"do": "release"}, deadline_s=PREPARE_S)
        worker.detach(self.operands.arena)
