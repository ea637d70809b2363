"""Values of tuning: the request, the ways to run a workload, the job of a workload, and the tally."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from threading import Lock
from typing import Protocol, runtime_checkable

from autosel.candidates.base import Candidate
from autosel.ledger.describe import shape
from autosel.ledger.store import Ledger
from autosel.models.workloads import Named
from autosel.parity.session import CALL_S
from autosel.race.run import Tick
from autosel.values import Arm, Decision, Fingerprint, Knobs, Parity, Race, Recipe, Verdict, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The workloads to tune, and options.

    `budget_s`: time limit in seconds; 0 means none. `seed` makes operands and the order of arms repeatable.
    `call_deadline_s`: timeout of one call in a proof.
    """

    workloads: tuple[Named, ...]
    effort: str = "quick"
    device: str = "cpu"
    budget_s: float = 0.0
    seed: int | None = None
    force: bool = False  # measure settled decisions again
    wait: bool = False  # wait for a quiet machine before each session
    realtime: bool = False  # give races priority over other processes
    call_deadline_s: float = CALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A candidate that may not race or has failed. `stage`: eligible, quarantine, build, parity or race; baseline, if
    PyTorch's own op fails its proof, and stays the baseline.

    `quarantine`: number of its quarantine, or 0.
    """

    workload: Workload
    candidate: str
    stage: str
    reason: str
    quarantine: int = 0


class Stages(Protocol):
    """Listener to progress by stages: a tune's listener, or its tally."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...


class TuneListener(Stages, Protocol):
    def decided(self, decision: Decision, settled_before: bool) -> None: ...

    def rejected(self, rejection: Rejection) -> None: ...


@runtime_checkable
class Spectator(Protocol):
    """Listener that also follows each race pair by pair."""

    def pair(self, tick: Tick) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Buildable:
    """A candidate at a workload, ready to build: its knobs, its recipe and its arm.

    `released_at`: end of its last quarantine. Decisions and failures before that time do not count.
    """

    candidate: Candidate
    knobs: Knobs
    recipe: Recipe
    build_digest: str
    arm: Arm
    released_at: str = ""


@dataclass(slots=True, kw_only=True)
class Job:
    """The tuning of one workload, from its ways to its verdict.

    `probe`: the workload races only to find the winner at another length of a bucket, and gets no decision.
    """

    named: Named
    mode: str
    baseline: Buildable
    ways: list[Buildable]  # challengers, including the incumbent unless it is the baseline
    incumbent: Buildable
    offered: tuple[str, ...] = ()  # digests of all arms considered; a new one reopens a settled bucket
    probe: bool = False
    late: bool = False  # the budget ended before all ways were built and proven, so the job does not race
    settled: tuple[Decision, ...] = ()
    parities: list[tuple[Arm, Parity]] = field(default_factory=list)
    race: Race | None = None
    verdict: Verdict | None = None

    @property
    def workload(self) -> Workload:
        return self.named.workload

    def drop(self, way: Buildable) -> None:
        """Remove a way; if it was the incumbent, the baseline becomes the incumbent."""
        if way in self.ways:
            self.ways.remove(way)
        if way is self.incumbent:
            self.incumbent = self.baseline

    @property
    def winner(self) -> Buildable:
        """Return the way that will serve: the verdict's winner, or the incumbent if nothing raced."""
        if self.verdict is None:
            return self.incumbent
        return next(way for way in [self.baseline, *self.ways] if way.candidate.name == self.verdict.winner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Context of one call of `tune`: device, ledger, request, listener, random numbers and clock."""

    fp: Fingerprint
    ledger: Ledger
    request: Request
    tally: TuneEvents
    rng: Random
    clock: Callable[[], float]
    deadline: float

    @property
    def over(self) -> bool:
        """Return True once the budget has ended; then no more work starts."""
        return self.clock() > self.deadline


class TuneEvents:
    """The events of a tune so far. Forwards each one to the listener."""

    def __init__(self, listener: TuneListener) -> None:
        self.listener = listener
        self.decisions: list[Decision] = []
        self.rejections: list[Rejection] = []
        self.undecided: list[Named] = []
        self.measured = 0
        self._counted = ("", 0, 0)  # the last stage with a count: name, done, total
        self._one = Lock()  # builds and proofs report from several threads

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        """Report a stage; with total 0, a new detail of a stage, which keeps its count."""
        with self._one:
            if total:
                self._counted = (name, done, total)
            elif name == self._counted[0]:
                _, done, total = self._counted
            self.listener.stage(name, detail, done, total)

    def tick(self, tick: Tick) -> None:
        w = tick.contest.workload
        detail = "  ".join(x for x in (f"{tick.pairs} pairs", tick.candidate, f"{w.op} {shape(w)}") if x)
        self.listener.stage(tick.stage, detail, tick.done, tick.total)
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
        """Count a job as undecided because the budget ended before its race. The next tune reuses its proofs."""
        self.undecided.append(job.named)

    def rejected(self, w: Workload, candidate: str, stage: str, reason: str, *, quarantine: int = 0) -> None:
        rejection = Rejection(workload=w, candidate=candidate, stage=stage, reason=reason, quarantine=quarantine)
        self.rejections.append(rejection)
        self.listener.rejected(rejection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of `tune`. `measured`: number of decisions made by this run; the others were settled before."""

    fingerprint: Fingerprint
    decisions: tuple[Decision, ...]
    measured: int
    rejected: tuple[Rejection, ...]
    undecided: tuple[Named, ...]
    seconds: float
    labels: Mapping[str, str] = field(default_factory=dict)
