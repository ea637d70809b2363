"""Races: one screening session, three confirming sessions of the finalist, each in a fresh process.

All workloads of a session share its process: four process starts whatever the number of workloads. A process that dies
takes only its session with it; the culprit is found by running each challenger alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from autosel.candidates.control import empties
from autosel.errors import BuildError, WorkerError
from autosel.ops.contract import Mismatch
from autosel.race.contest import Contest, Entrant, Operands, empty_entrant
from autosel.race.evidence import median
from autosel.race.judge import CLONE, has_lost, nominees, pair_medians
from autosel.race.plan import SESSIONS, VOIDS_ALLOWED, Margin, Plan, TimeClass, plan
from autosel.race.session import Duel, Trial, confirm, screen
from autosel.values import Race, Session, to_json
from autosel.workers.environment import control_fault
from autosel.workers.process import Worker

log = logging.getLogger(__name__)

WARM_NS = 100_000_000
CEILING_SLACK = 1.1
# One contest of each time class carries the A/A comparison of a session, drawn by coin from those where it is cheap: it
# must go on as long as a confirming session may, whatever the others need.
CLONE_LIMIT_NS = 3_000_000
CLONE_LIMIT_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # a GPU's copies take longer to be cold than to be made
CLONE_SHARE = 0.3
MAX_ATTEMPTS = 3  # nominees that may follow one another, each with its own debit
LOAD_S, PREPARE_S = 60.0, 120.0
SLOWER = 10  # than the baseline by its first time: what a call may take, on a machine that does other things too
CHECK_SHARE = 0.1  # of the pairs after the first, by coin: any sample's output may be the one that is checked

Progress = Callable[["Tick"], None]
Debit = Callable[[Contest, str, Margin], bool]
Journal = Callable[[Contest, Sequence[str]], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Where a race is: for the line that moves."""

    contest: Contest
    stage: str  # "screening", "confirming 1" ...
    candidate: str
    session: Session  # as far as it has come

    @property
    def pairs(self) -> int:
        return len(self.session.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disqualified:
    """A challenger that failed while racing: wrong output, crash (after which the control worked), or faster than
    memory allows."""

    contest: Contest
    candidate: str
    check: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """A worker's reply to `warm`: nanoseconds a call, by arm."""

    ns: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A worker's reply to `pair`: the samples by arm, and why they must be dropped or ""."""

    ns: Mapping[str, tuple[float, ...]]
    disturbed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A worker's reply to `probe`."""

    bytes_per_s: float


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A contest on its way through the sessions."""

    contest: Contest
    debit: Debit
    plan: Plan | None = None
    screening: Session | None = None
    finalist: str | None = None
    nominees: list[str] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)  # disqualified candidates and why
    notes: list[str] = field(default_factory=list)
    voids: int = 0
    attempts: int = 0
    done: bool = False

    @property
    def confirming(self) -> list[Session]:
        return [s for s in self.sessions if s.kind == "confirming" and not s.voided and self.finalist in s.arms]

    @property
    def margin(self) -> Margin:
        return self.contest.margins[self.plan.time_class if self.plan else "short"]

    @property
    def delta(self) -> float:
        return self.margin.delta

    def arms(self) -> list[str]:
        c = self.contest
        names = [c.baseline.candidate]
        if c.incumbent.candidate != c.baseline.candidate:
            names.append(c.incumbent.candidate)
        names += [e.candidate for e in c.challengers if e.candidate not in (*names, *self.out)]
        return names

    def rivals(self) -> list[str]:
        c = self.contest
        return list(dict.fromkeys((c.baseline.candidate, c.incumbent.candidate)))

    def race(self) -> Race:
        margin = self.margin
        return Race(
            workload=self.contest.workload,
            baseline=self.contest.baseline.candidate,
            incumbent=self.contest.incumbent.candidate,
            finalist=self.finalist,
            delta=margin.delta,
            alpha_session=margin.alpha_session,
            pi=margin.pi,
            sessions=tuple(self.sessions),
            time_class=self.plan.time_class if self.plan else "short",
            nominees=tuple(self.nominees),
            notes=tuple(self.notes),
        )


Finished = tuple[Contest, Race]


def _always(*_: object) -> bool:
    """No budget to debit: a race outside a ledger."""
    return True


def _silent(*_: object) -> None:
    """Nobody watches."""


def _unkept(*_: object) -> AbstractContextManager[None]:
    """No journal."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What every race of a run shares. At `deadline` (on `clock`) no new work starts.

    `debit` takes an attempt's error probability from its key's lifetime budget; False: the budget is spent.
    `journal` is entered while arms run for the first time in a process, with their names: should the machine not
    survive it, they are known. Not while a race is paused or goes on: who pulls the plug then says nothing about them.
    `clone_share` is the chance that a contest carries the A/A comparison; who calibrates sets it to 1.
    """

    threads: int
    rng: Random
    device: str = "cpu"
    debit: Debit = _always
    progress: Progress = _silent
    journal: Journal = _unkept
    clock: Callable[[], float] = time.monotonic
    deadline: float = float("inf")
    clone_share: float = CLONE_SHARE

    @property
    def over(self) -> bool:
        return self.clock() > self.deadline


def run(contests: Sequence[Contest], terms: Terms) -> Iterator[Finished | Disqualified]:
    """Race every contest; each one's Race is yielded as soon as it is complete.

    What is unfinished at the deadline is yielded unfinished, and will be judged undecided. Raises EnvironmentFault if
    workers do not start, or fall with the baseline and an empty candidate alone in them.
    """
    attempts = [_Attempt(contest=c, debit=terms.debit) for c in contests]
    shelf = _Shelf(terms.rng)
    try:
        yield from _screen_all(attempts, shelf, terms)
        for _ in range(SESSIONS * MAX_ATTEMPTS + VOIDS_ALLOWED):
            pending = [a for a in attempts if not a.done]
            if not pending or terms.over:
                break
            yield from _confirm_all(pending, shelf, terms)
        for attempt in attempts:
            if not attempt.done:
                attempt.notes.append("the budget ended before three sessions were complete")
                yield attempt.contest, attempt.race()
    finally:
        shelf.close()


# --- the two kinds of session ----------------------------------------------------------------------------------------


def _screen_all(attempts: Sequence[_Attempt], shelf: _Shelf, terms: Terms) -> Iterator[Finished | Disqualified]:
    """Screen every contest in one process; those without a nominee are finished."""
    process = _Process(terms)
    try:
        for attempt in attempts:
            if terms.over:
                return
            while attempt.screening is None and attempt.voids < VOIDS_ALLOWED:
                seated = _Seated(process, attempt, attempt.arms(), shelf, terms.rng)
                session = _guarded(seated, _screen, terms)
                yield from _consequences(attempt, seated, session)
                if not session.voided:
                    attempt.screening = session
            _nominate(attempt)
            if attempt.done:
                yield attempt.contest, attempt.race()
    finally:
        process.close()


def _confirm_all(pending: Sequence[_Attempt], shelf: _Shelf, terms: Terms) -> Iterator[Finished | Disqualified]:
    """One confirming session of every pending contest, in one fresh process."""
    process = _Process(terms)
    try:
        for attempt in pending:
            if terms.over:
                return
            assert attempt.finalist is not None
            seated = _Seated(process, attempt, [*attempt.rivals(), attempt.finalist], shelf, terms.rng)
            session = _guarded(seated, _confirm, terms)
            yield from _consequences(attempt, seated, session)
            _advance(attempt, session)
            if attempt.done:
                yield attempt.contest, attempt.race()
    finally:
        process.close()


def _screen(seated: _Seated, terms: Terms) -> Session:
    return screen(seated, seated.arms, _trial(seated, terms, "screening"))


def _confirm(seated: _Seated, terms: Terms) -> Session:
    attempt = seated.attempt
    assert attempt.finalist is not None
    assert attempt.screening is not None
    duel = Duel(arms=tuple(seated.arms), finalist=attempt.finalist, rivals=tuple(attempt.rivals()))
    trial = _trial(seated, terms, f"confirming {len(attempt.confirming) + 1}")
    return confirm(seated, duel, trial, attempt.screening, attempt.confirming)


def _trial(seated: _Seated, terms: Terms, stage: str) -> Trial:
    attempt = seated.attempt

    def watch(session: Session) -> None:
        terms.progress(Tick(contest=attempt.contest, stage=stage, candidate=attempt.finalist or "", session=session))

    return Trial(plan=seated.plan, delta=attempt.delta, seed=terms.rng.getrandbits(32), watch=watch)


# --- what follows from a session -------------------------------------------------------------------------------------


def _guarded(seated: _Seated, take: Callable[[_Seated, Terms], Session], terms: Terms) -> Session:
    """The session, or a voided one saying what ended it."""
    try:
        with terms.journal(seated.attempt.contest, tuple(seated.arms)):
            seated.sit()
        session = take(seated, terms)
        seated.release()
        return _below_ceiling(seated, session)
    except (_WrongOutputError, WorkerError) as error:
        if isinstance(error, WorkerError):
            seated.culprits = seated.process.find_culprit(seated)
        else:
            seated.culprits = {error.arm: error.mismatch}
        return Session(
            kind="confirming" if seated.attempt.screening else "screening",
            seed=0,
            arms=tuple(seated.arms),
            pairs=(),
            calls_per_sample=(),
            voided=str(error).splitlines()[0],
        )


def _below_ceiling(seated: _Seated, session: Session) -> Session:
    """Void a session in which somebody streamed faster than the probe beside it: one of the two is not what it seems.

    Blame falls only on who is also faster than this device has ever read: a disturbed probe is nobody's fault.
    """
    assert seated.operands is not None
    streamed, probed = seated.operands.streamed_bytes, session.read_bytes_per_s
    if not streamed or not probed or session.voided or not session.pairs:
        return session
    for arm in session.arms:
        times = pair_medians(session, arm)
        rate = streamed / (median(times) * 1e-9) if times else 0.0
        if rate <= CEILING_SLACK * probed:
            continue
        why = f"{arm} took its operands at {rate / 1e9:.1f} GB/s; memory read beside it at {probed / 1e9:.1f} GB/s"
        if rate > CEILING_SLACK * max(probed, seated.attempt.contest.read_bytes_per_s):
            seated.too_fast[arm] = why
        return replace(session, voided=why)
    return session


def _consequences(attempt: _Attempt, seated: _Seated, session: Session) -> Iterator[Disqualified]:
    """Keep the session; replace the process of a voided one; send off whoever is to blame."""
    attempt.plan = seated.plan_or_none or attempt.plan
    attempt.sessions.append(session)
    if session.voided:
        attempt.voids += 1
        log.info("session voided: %s", session.voided)
        seated.process.renew()
        if attempt.voids >= VOIDS_ALLOWED:
            for arm, why in seated.too_fast.items():
                seated.culprits[arm] = Mismatch(check="faster than memory", reason=why, evidence={})
    for name, mismatch in seated.culprits.items():
        if name not in (attempt.contest.baseline.candidate, CLONE) and name not in attempt.out:
            attempt.out[name] = mismatch.reason
            yield Disqualified(contest=attempt.contest, candidate=name, check=mismatch.check, reason=mismatch.reason)


def _nominate(attempt: _Attempt) -> None:
    """Choose the next finalist, or find that there is none."""
    if attempt.screening is None:
        attempt.done = True
        return
    fresh = nominees(
        attempt.screening, attempt.contest.incumbent.candidate, attempt.delta, [*attempt.nominees, *attempt.out]
    )
    if not fresh or attempt.attempts >= MAX_ATTEMPTS:
        attempt.done = True
    elif not attempt.debit(attempt.contest, fresh[0], attempt.margin):
        attempt.notes.append(f"{fresh[0]} leads, but this key's lifetime error budget is spent")
        attempt.done = True
    else:
        attempt.finalist = fresh[0]
        attempt.nominees.append(fresh[0])
        attempt.attempts += 1


def _advance(attempt: _Attempt, session: Session) -> None:
    if attempt.finalist in attempt.out:
        attempt.notes.append(f"{attempt.finalist} fell: {attempt.out[attempt.finalist]}")
        before = attempt.finalist
        _nominate(attempt)
        if attempt.finalist == before:
            attempt.finalist = None
    elif session.voided:
        if attempt.voids >= VOIDS_ALLOWED:
            attempt.notes.append(session.voided)
            attempt.done = True
    else:
        lost = has_lost(session, str(attempt.finalist), attempt.rivals(), attempt.delta)
        attempt.done = lost or len(attempt.confirming) >= SESSIONS


# --- processes and seats ---------------------------------------------------------------------------------------------


class _WrongOutputError(Exception):
    def __init__(self, arm: str, mismatch: Mismatch) -> None:
        super().__init__(f"{arm} gave a wrong result while racing: {mismatch.reason}")
        self.arm, self.mismatch = arm, mismatch


class _Shelf:
    """The operands of the workload at hand, and of those still pending while memory lasts: drawn once."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.shelf: dict[str, Operands] = {}

    def get(self, contest: Contest) -> Operands:
        key = contest.workload.key
        if key not in self.shelf:
            self.shelf[key] = Operands(contest.workload, self.rng.getrandbits(31), contest.llc_bytes)
        return self.shelf[key]

    def close(self) -> None:
        for operands in self.shelf.values():
            operands.close()
        self.shelf.clear()


class _Process:
    """A race worker that is replaced after a void or a death; remembers what it has loaded."""

    def __init__(self, terms: Terms) -> None:
        self.threads, self.clone_share, self.device = terms.threads, terms.clone_share, terms.device
        self.worker: Worker | None = None
        self.loaded: set[str] = set()
        self.cloned: set[TimeClass] = set()  # classes whose A/A comparison this process has carried

    def get(self) -> Worker:
        if self.worker is None:
            self.worker = Worker("autosel.race.child:serve", threads=self.threads)
            self.loaded = set()
        return self.worker

    def load(self, entrant: Entrant) -> None:
        worker = self.get()
        if entrant.loaded_name in self.loaded:
            return
        worker.request({"do": "load", "entrant": to_json(entrant), "device": self.device}, deadline_s=LOAD_S)
        self.loaded.add(entrant.loaded_name)

    def find_culprit(self, seated: _Seated) -> dict[str, Mismatch]:
        """Run each challenger alone with the baseline: whoever brings its process down again is the culprit, if the
        control does not. Raises EnvironmentFault if it does."""
        self.renew()
        found: dict[str, Mismatch] = {}
        base = seated.arms[0]
        for arm in (a for a in seated.arms if a not in (base, CLONE)):
            alone = _Seated(self, seated.attempt, [base, arm], seated.shelf, seated.rng)
            try:
                alone.sit()
                for _ in range(3):
                    alone.pair([base, arm], alone.plan.calls, alone.plan.samples)
                alone.release()
            except (WorkerError, _WrongOutputError) as again:
                if (
                    isinstance(again, WorkerError) and again.retryable
                ):  # memory ran out: it may not have been this one's
                    self.renew()
                    continue
                cause = again.cause if isinstance(again, WorkerError) else "wrong output"
                found[arm] = Mismatch(check="crash", reason=f"{again} ({cause})", evidence={"cause": cause})
                self.renew()
        if found:
            self._require_control(seated, found)
        return found

    def _require_control(self, seated: _Seated, fallen: Collection[str]) -> None:
        """Call the baseline beside an empty candidate, loaded as the fallen ones are, in a new process. Raises
        EnvironmentFault if it falls too."""
        contest = seated.attempt.contest
        base = contest.baseline.candidate
        for empty in empties(contest.workload.op, [contest.entrants[arm].recipe for arm in fallen]):
            try:
                attempt = _Attempt(contest=replace(contest, challengers=(empty_entrant(empty),)), debit=_always)
                control = _Seated(self, attempt, [base, empty.name], seated.shelf, seated.rng)
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


class _Seated:
    """Some arms of one contest seated in a worker: the Instrument of a session."""

    def __init__(self, process: _Process, attempt: _Attempt, arms: Sequence[str], shelf: _Shelf, rng: Random) -> None:
        self.process, self.attempt, self.shelf, self.rng = process, attempt, shelf, rng
        self.arms = list(arms)
        self.plan_or_none: Plan | None = attempt.plan
        self.culprits: dict[str, Mismatch] = {}
        self.too_fast: dict[str, str] = {}
        self.operands: Operands | None = None
        self.pairs = 0
        self.base_ns = 0.0  # a call of the baseline

    @property
    def plan(self) -> Plan:
        assert self.plan_or_none is not None
        return self.plan_or_none

    def sit(self) -> None:
        """Load, copy the operands, warm up; plan from the baseline's time."""
        contest = self.attempt.contest
        entrants = contest.entrants
        for arm in self.arms:
            self.process.load(entrants[arm])
        self.operands = self.shelf.get(contest)
        worker = self.process.get()
        worker.attach(self.operands.arena)
        self._prepare(worker)
        base_ns = worker.told(Warmed, {"do": "warm", "limit_ns": WARM_NS}, PREPARE_S).ns.get(self.arms[0], 0.0)
        self.base_ns = base_ns
        if base_ns <= 0:
            raise WorkerError(f"the baseline is said to take {base_ns:g} ns", cause="protocol")
        if self.plan_or_none is None:
            self.plan_or_none = self.attempt.plan = plan(base_ns)
        if self._carries_clone(base_ns):
            self.arms.append(CLONE)
            self.process.cloned.add(self.plan.time_class)
            self._prepare(worker)
            worker.request({"do": "warm", "limit_ns": WARM_NS // 4}, deadline_s=PREPARE_S)

    def _carries_clone(self, base_ns: float) -> bool:
        assert self.operands is not None
        size = self.operands.streamed_bytes * self.operands.copies
        wanted = self.plan.time_class not in self.process.cloned and self.rng.random() < self.process.clone_share
        limit = CLONE_LIMIT_BYTES[self.process.device.partition(":")[0]]
        return wanted and base_ns <= CLONE_LIMIT_NS and size <= limit

    def _prepare(self, worker: Worker) -> None:
        contest, operands = self.attempt.contest, self.operands
        assert operands is not None
        names = {arm: contest.entrants[self.arms[0] if arm == CLONE else arm].loaded_name for arm in self.arms}
        request = {
            "do": "prepare",
            "workload": to_json(contest.workload),
            "inputs": to_json(operands.refs),
            "arms": names,
            "copies": operands.copies,
        }
        worker.request(request, deadline_s=PREPARE_S)

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        """One pair on fresh resident operands; now and then its outputs are checked here. Raises _WrongOutputError."""
        operands = self.operands
        assert operands is not None
        seed = self.rng.getrandbits(31)
        checked = self.pairs == 0 or self.rng.random() < CHECK_SHARE
        self.pairs += 1
        request = {
            "do": "pair",
            "order": list(order),
            "calls": calls,
            "samples": samples,
            "wake": self.plan.wakes,
            "resident": to_json(operands.refresh(seed)),
            "outputs": {a: to_json(operands.places(a)) for a in order if a != CLONE} if checked else {},
        }
        started = time.perf_counter_ns()
        allowed_s = PREPARE_S + SLOWER * self.base_ns * 1e-9 * calls * samples * len(order)
        taken = self.process.get().told(Taken, request, allowed_s)
        wall_ns = time.perf_counter_ns() - started
        if set(taken.ns) != set(order) or any(len(ns) != samples for ns in taken.ns.values()):
            raise WorkerError("other samples came than were asked for", cause="protocol")
        self._bound_claims(taken.ns, calls, wall_ns)
        if checked:
            self._check(order, seed)
        return taken.ns, taken.disturbed

    def _bound_claims(self, times: Mapping[str, Sequence[float]], calls: int, wall_ns: int) -> None:
        """The claimed times cannot exceed the wall time we saw; a patched clock is caught from the other side by the
        ceiling and by the share of the wall time that nobody accounts for."""
        claimed = sum(sum(ns) for ns in times.values()) * calls
        if claimed > wall_ns or any(t <= 0 for ns in times.values() for t in ns):
            raise WorkerError(f"samples of {claimed:.0f} ns in {wall_ns} ns of wall time", cause="clock")

    def _check(self, order: Sequence[str], seed: int) -> None:
        assert self.operands is not None
        for arm in order:
            if arm == CLONE:
                continue
            mismatch = self.operands.check(arm, seed)
            if mismatch is not None:
                raise _WrongOutputError(arm, mismatch)

    def probe(self) -> float:
        if self.operands is None or not self.operands.streamed_bytes:
            return 0.0
        return self.process.get().told(Probed, {"do": "probe"}, PREPARE_S).bytes_per_s

    def release(self) -> None:
        worker = self.process.get()
        worker.request({"do": "release"}, deadline_s=PREPARE_S)
        if self.operands is not None:
            worker.detach(self.operands.arena)
