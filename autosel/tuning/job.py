"""What tuning passes along: the request, the ways of running a workload, the job they make up, and the tally."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from threading import Lock
from typing import Protocol, runtime_checkable

from autosel.candidates.base import Candidate
from autosel.ledger.store import Ledger
from autosel.models.workloads import Named
from autosel.parity.session import CALL_S
from autosel.race.run import Tick
from autosel.values import Arm, Decision, Fingerprint, Knobs, Parity, Race, Recipe, Verdict, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to tune. `budget_s` 0: as long as it needs. `seed` makes the draw of operands and coins repeatable. A call
    of a proof that takes longer than its deadline has hung."""

    workloads: tuple[Named, ...]
    effort: str = "quick"
    device: str = "cpu"
    budget_s: float = 0.0
    seed: int | None = None
    force: bool = False  # measure again what is settled
    wait: bool = False  # for a quiet machine, before each session
    realtime: bool = False  # samples are taken again at real-time priority
    call_deadline_s: float = CALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A candidate that does not race, or fell: `stage` is eligible, quarantine, build, parity or race. `quarantine` is
    the number of the quarantine that holds it from now on, or 0."""

    workload: Workload
    candidate: str
    stage: str
    reason: str
    quarantine: int = 0


class Listener(Protocol):
    """Who wants to know how it goes."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...

    def decided(self, decision: Decision, settled_before: bool) -> None: ...

    def rejected(self, rejection: Rejection) -> None: ...


@runtime_checkable
class Spectator(Protocol):
    """A listener that also wants to see each race as its pairs come in."""

    def pair(self, tick: Tick) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A candidate at a workload, ready to be built: its knobs, its recipe, and the arm it would be. `released_at`: when
    its last quarantine ended; what was decided without it before, and failures before, no longer hold."""

    candidate: Candidate
    knobs: Knobs
    recipe: Recipe
    build_digest: str
    arm: Arm
    released_at: str = ""


@dataclass(slots=True, kw_only=True)
class Job:
    """One workload on its way to a decision.

    `probe` marks a workload raced only to learn who wins at the other end of a bucket; it is not a decision by itself.
    """

    named: Named
    mode: str
    baseline: Way
    ways: list[Way]  # challengers, the incumbent among them if it is not the baseline
    incumbent: Way
    offered: tuple[str, ...] = ()  # digests of all arms considered: a new one, and only that, opens a settled bucket
    probe: bool = False
    late: bool = False  # the budget ended before all its ways were built and proven: it is not raced
    settled: tuple[Decision, ...] = ()
    parities: list[tuple[Arm, Parity]] = field(default_factory=list)
    race: Race | None = None
    verdict: Verdict | None = None

    @property
    def workload(self) -> Workload:
        return self.named.workload

    def drop(self, way: Way) -> None:
        """Take a way out; if it was the incumbent, the baseline is."""
        if way in self.ways:
            self.ways.remove(way)
        if way is self.incumbent:
            self.incumbent = self.baseline

    @property
    def winner(self) -> Way:
        """Who is to serve: the verdict's winner, or the incumbent where nothing was raced."""
        if self.verdict is None:
            return self.incumbent
        return next(way for way in [self.baseline, *self.ways] if way.candidate.name == self.verdict.winner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Where one call of `tune` works: the device, the ledger, the request, who listens, the coins and the clock."""

    fp: Fingerprint
    ledger: Ledger
    request: Request
    tally: Tally
    rng: Random
    clock: Callable[[], float]
    deadline: float

    @property
    def over(self) -> bool:
        """Has the budget ended? Then nothing new begins."""
        return self.clock() > self.deadline

    @property
    def threads(self) -> int:
        """Return the threads that every arm may use, baseline and challengers alike; 0 on a GPU, where the host only
        launches: torch's default."""
        return self.fp.cpus


class Tally:
    """What happened so far, told to the listener as it happens."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.decisions: list[Decision] = []
        self.rejections: list[Rejection] = []
        self.undecided: list[Named] = []
        self.measured = 0
        self.races = 0
        self._one = Lock()  # builds and proofs tell from threads

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        with self._one:
            self.listener.stage(name, detail, done, total)

    def tick(self, tick: Tick) -> None:
        """A pair was taken."""
        w = tick.contest.workload
        detail = "  ".join(x for x in (f"{tick.pairs} pairs", tick.candidate, f"{w.op} {w.shape_text}") if x)
        self.listener.stage(tick.stage, detail, self.measured, self.races)
        if isinstance(self.listener, Spectator):
            self.listener.pair(tick)

    def settled(self, job: Job) -> None:
        for decision in job.settled:
            self.decisions.append(decision)
            self.listener.decided(decision, settled_before=True)

    def decided(self, job: Job, decision: Decision) -> None:
        self.measured += 1
        self.decisions.append(decision)
        if decision.verdict is not None and decision.verdict.outcome == "undecided":
            self.undecided.append(job.named)
        self.listener.decided(decision, settled_before=False)

    def late(self, job: Job) -> None:
        """The budget ended before the race: nothing is recorded, and the next tune goes on from the proofs."""
        self.undecided.append(job.named)

    def rejected(self, w: Workload, candidate: str, stage: str, reason: str, *, quarantine: int = 0) -> None:
        rejection = Rejection(workload=w, candidate=candidate, stage=stage, reason=reason, quarantine=quarantine)
        self.rejections.append(rejection)
        self.listener.rejected(rejection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `tune` returns. `measured` of the decisions were made now; the others were settled before."""

    fingerprint: Fingerprint
    decisions: tuple[Decision, ...]
    measured: int
    rejected: tuple[Rejection, ...]
    undecided: tuple[Named, ...]
    seconds: float
    labels: Mapping[str, str] = field(default_factory=dict)
