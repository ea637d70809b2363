"""Races: one screening session, three confirming sessions of the finalist, by the same rules for every instrument.

If screening does not tell the two fastest apart, both are in the confirming sessions (`runner_up`).

    for found in run(contests, terms, Workers(threads=8, rng=rng)):     # race.worker: each stage in a fresh process
        ...                                                             # Disqualified, or (contest, its Race)

A `Venue` holds the sessions. If a session crashes, the venue names the arm at fault, after its control worked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from autosel.devices.cpu import neighbours
from autosel.devices.cpu.neighbours import Reading
from autosel.ops.contract import Mismatch
from autosel.race.contest import COLD_OVER_LLC, Contest
from autosel.race.evidence import median
from autosel.race.judge import CLONE, favoured, has_lost, leaders, nominees, pair_medians
from autosel.race.plan import SESSIONS, VOIDS_ALLOWED, Margin, TrialPlan
from autosel.race.session import BUSY, Duel, Instrument, Phase, SessionRules, confirm, screen
from autosel.values import Conditions, Deployed, Prepared, Race, RaceSession

log = logging.getLogger(__name__)

CEILING_SLACK = 1.1
FAR_ABOVE_FLOOR = 2.0  # most by which an arm may be slowed more than another; in 48 sessions with other work: 1.4
MAX_ATTEMPTS = 3  # successive nominees, each with its own debit

OnTick = Callable[["Tick"], None]
Debit = Callable[[Contest, str, Margin], bool]
Journal = Callable[[Contest, Sequence[str]], AbstractContextManager[Any]]


# --- where sessions are held -----------------------------------------------------------------------------------------


class Seat(Instrument, Protocol):
    """Some arms of one contest, to be timed in one session."""

    arms: list[str]  # the baseline first; the clone last, if the session carries the A/A comparison
    plan: TrialPlan | None  # None until the baseline was timed
    failures: tuple[type[Exception], ...]  # errors that end a session; `blame` returns the arms at fault

    @property
    def again(self) -> int:
        """Return the number of samples that were repeated because a thread waited for a core."""

    @property
    def watched(self) -> bool:
        """Return True if the system reports when a thread waits for a core, or if it does not matter."""

    @property
    def prepared(self) -> Mapping[str, Prepared]:
        """Return the cost of preparing one call's weights by arm, for the arms that have a layout."""

    @property
    def checked(self) -> Mapping[str, tuple[int, int]]:
        """Return (calls whose results were compared in full, timed calls) by arm."""

    def sit(self) -> None:
        """Load the arms and time the baseline."""

    def deployed(self, arms: Sequence[str]) -> tuple[Deployed, ...]:
        """Time single calls of these arms in the situations of a program; empty if that would be meaningless."""

    def moved_bytes(self, arm: str) -> int:
        """Return the bytes that one call must read; they come from memory if `probe` gives a rate."""

    def blame(self, error: Exception) -> Mapping[str, Mismatch]:
        """Return the arms that ended the session with this error, if any.

        Raises EnvironmentFault if the control also fails.
        """

    def release(self) -> None:
        """Release the operands."""


class Room(Protocol):
    """A process that holds the sessions of one stage."""

    def seat(self, contest: Contest, arms: Sequence[str], plan: TrialPlan | None) -> Seat: ...

    def renew(self) -> None:
        """Restart after a session that was void."""

    def close(self) -> None: ...


class Venue(Protocol):
    """Opens a room for each stage."""

    def room(self) -> Room: ...

    def close(self) -> None: ...


# --- a race's terms and what comes of it -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The progress of a race, for a status line."""

    contest: Contest
    stage: str  # "screening", "confirming 1" ...
    candidate: str
    session: RaceSession  # so far
    done: int  # contests that this stage has finished
    total: int  # contests of this stage

    @property
    def pairs(self) -> int:
        return len(self.session.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disqualified:
    """A challenger that failed while racing: wrong output, crash (after which the control worked), or faster than
    memory allows.
    """

    contest: Contest
    candidate: str
    check: str
    reason: str


Finished = tuple[Contest, Race]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceTerms:
    """The terms that all races of a run share. At `deadline` (on `clock`) no new work starts.

    `debit` takes an attempt's error probability from its key's lifetime budget; False: the budget is spent. `quiet`
    waits until the machine is quiet; with it, a session that other work has voided is repeated. `journal` is entered,
    with the names of the arms, while they run for the first time in a process: if the machine crashes, they are known.
    It is not entered while a race is paused or continues, when a power failure says nothing about them.
    """

    rng: Random
    debit: Debit = lambda *_: True  # outside a ledger
    progress: OnTick = lambda tick: None
    journal: Journal = lambda *_: nullcontext()
    clock: Callable[[], float] = time.monotonic
    deadline: float = float("inf")
    quiet: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        return self.clock() > self.deadline


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A contest and its progress through the sessions."""

    contest: Contest
    plan: TrialPlan | None = None
    screening: RaceSession | None = None
    finalist: str | None = None
    runner_up: str | None = None  # level with the finalist in screening
    nominees: list[str] = field(default_factory=list)
    sessions: list[RaceSession] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)  # disqualified candidates, with the reasons
    notes: list[str] = field(default_factory=list)
    voids: int = 0
    done: bool = False
    place: tuple[int, int] = (0, 1)  # contests before this one in the present stage, contests of the stage

    @property
    def confirming(self) -> list[RaceSession]:
        return [s for s in self.sessions if s.kind == "confirming" and not s.voided and self.finalist in s.arms]

    @property
    def margin(self) -> Margin:
        return self.contest.margins[self.plan.time_class if self.plan else "short"]

    @property
    def delta(self) -> float:
        return self.margin.delta

    def arms(self) -> list[str]:
        challengers = [e.candidate for e in self.contest.challengers if e.candidate not in self.out]
        return list(dict.fromkeys([*self.rivals(), *challengers]))

    def rivals(self) -> list[str]:
        c = self.contest
        return list(dict.fromkeys((c.baseline.candidate, c.incumbent.candidate)))

    def finalists(self) -> list[str]:
        return [arm for arm in (self.finalist, self.runner_up) if arm is not None]

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


# --- the rules -------------------------------------------------------------------------------------------------------


def run(contests: Sequence[Contest], terms: RaceTerms, venue: Venue) -> Iterator[Finished | Disqualified]:
    """Race every contest; yield each one's Race as soon as it is complete.

    Contests that are unfinished at the deadline are yielded unfinished, and are judged undecided. Raises
    EnvironmentFault if the venue or its control fails.
    """
    attempts = [_Attempt(contest=c) for c in contests]
    with closing(venue):
        yield from _stage(attempts, _screened, venue, terms)
        while (pending := [a for a in attempts if not a.done]) and not terms.over:
            yield from _stage(pending, _confirmed, venue, terms)
        for attempt in attempts:
            if not attempt.done:
                attempt.notes.append("the budget ended before three sessions were complete")
                yield attempt.contest, attempt.race()


def _stage(
    attempts: Sequence[_Attempt],
    hold: Callable[[_Attempt, Room, RaceTerms], Iterator[Disqualified]],
    venue: Venue,
    terms: RaceTerms,
) -> Iterator[Finished | Disqualified]:
    """Hold the sessions of one stage in a fresh room; yield the contests that are then finished."""
    with closing(venue.room()) as room:
        for before, attempt in enumerate(attempts):
            if terms.over:
                return
            attempt.place = before, len(attempts)
            yield from hold(attempt, room, terms)
            if attempt.done:
                yield attempt.contest, attempt.race()


def _screened(attempt: _Attempt, room: Room, terms: RaceTerms) -> Iterator[Disqualified]:
    """Screen a contest; without a nominee it is finished."""
    while attempt.screening is None and attempt.voids < VOIDS_ALLOWED and not terms.over:
        seat = room.seat(attempt.contest, attempt.arms(), attempt.plan)
        held = _held(attempt, seat, _screen, terms)
        yield from _consequences(attempt, held, room, terms)
        if not held.session.voided:
            attempt.screening = held.session
    _nominate(attempt, terms)


def _confirmed(attempt: _Attempt, room: Room, terms: RaceTerms) -> Iterator[Disqualified]:
    """Hold one confirming session of a contest."""
    seat = room.seat(attempt.contest, [*attempt.rivals(), *attempt.finalists()], attempt.plan)
    held = _held(attempt, seat, _confirm, terms)
    yield from _consequences(attempt, held, room, terms)
    _advance(attempt, held.session, terms)


# --- the two kinds of session ----------------------------------------------------------------------------------------


def _screen(attempt: _Attempt, seat: Seat, terms: RaceTerms) -> RaceSession:
    return screen(seat, seat.arms, _trial(attempt, seat, terms, "screening"))


def _confirm(attempt: _Attempt, seat: Seat, terms: RaceTerms) -> RaceSession:
    assert attempt.finalist is not None
    assert attempt.screening is not None
    duel = Duel(arms=tuple(seat.arms), finalist=attempt.finalist, rivals=tuple(attempt.rivals()))
    trial = _trial(attempt, seat, terms, f"confirming {len(attempt.confirming) + 1}")
    session = confirm(seat, duel, trial, attempt.screening, attempt.confirming)
    return session if session.voided else replace(session, deployed=seat.deployed(session.arms))


def _trial(attempt: _Attempt, seat: Seat, terms: RaceTerms, stage: str) -> SessionRules:
    def watch(session: RaceSession) -> None:
        done, total = attempt.place
        name = attempt.finalist or ""
        terms.progress(
            Tick(contest=attempt.contest, stage=stage, candidate=name, session=session, done=done, total=total)
        )

    assert seat.plan is not None
    return SessionRules(plan=seat.plan, delta=attempt.delta, seed=terms.rng.getrandbits(32), watch=watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndedSession:
    """A finished session, and the arms at fault for its end."""

    session: RaceSession
    culprits: Mapping[str, Mismatch] = field(default_factory=dict)
    too_fast: Mapping[str, Mismatch] = field(default_factory=dict)  # blamed if it is repeated


def _held(
    attempt: _Attempt, seat: Seat, take: Callable[[_Attempt, Seat, RaceTerms], RaceSession], terms: RaceTerms
) -> _EndedSession:
    """Hold the session; a crashed one is void, with its reason."""
    if terms.quiet is not None:
        terms.quiet()
    try:
        try:
            with terms.journal(attempt.contest, tuple(seat.arms)):
                seat.sit()
        finally:
            attempt.plan = seat.plan or attempt.plan
        before = neighbours.read()
        session = _with_conditions(take(attempt, seat, terms), seat, before, neighbours.read())
        seat.release()
        return _below_ceiling(attempt, seat, near_floor(attempt.sessions, session))
    except seat.failures as error:
        kind: Phase = "confirming" if attempt.screening else "screening"
        culprits = seat.blame(error)
        why, arms = str(error).splitlines()[0], tuple(seat.arms)
        void = RaceSession(kind=kind, seed=0, arms=arms, pairs=(), calls_per_sample=(), voided=why)
        return _EndedSession(session=void, culprits=culprits)


def _with_conditions(session: RaceSession, seat: Seat, before: Reading, after: Reading) -> RaceSession:
    """Record what else happened during the session; if it voided the session, as the reason."""
    found = neighbours.between(before, after)
    conditions = Conditions(
        watched=seat.watched, again=seat.again, busy_cores=found.cores, stolen=found.stolen, by=found.by
    )
    busy = session.voided == BUSY and found.text
    voided = f"{BUSY}: {found.text}" if busy else session.voided
    checked = tuple(seat.checked.get(arm, (0, 0)) for arm in session.arms)
    session = replace(session, checked=checked if any(timed for _, timed in checked) else ())
    return replace(session, conditions=conditions, prepared=seat.prepared or None, voided=voided)


def near_floor(earlier: Sequence[RaceSession], session: RaceSession) -> RaceSession:
    """Void a session in which one arm was slowed far more than another, because its ratio would show the disturbance.

    An arm's floor is the best pair of this session and of those before it. A disturbance that slows all arms equally (a
    clock, memory that others use) does not change their ratio.
    """
    if session.voided:
        return session
    slowed = {arm: s for arm in session.arms if (s := _slowed([*earlier, session], arm)) is not None}
    if not slowed or max(slowed.values()) <= FAR_ABOVE_FLOOR * min(slowed.values()):
        return session
    arm = max(slowed, key=lambda name: slowed[name])
    told = (
        f"{arm} took {slowed[arm]:.1f} times as long as in its best pair, another arm {min(slowed.values()):.1f} times"
    )
    return replace(session, voided=f"{told}: something slowed one of them alone")


def _slowed(sessions: Sequence[RaceSession], arm: str) -> float | None:
    """Return an arm's median in the last session over its best pair in any; None if it was not timed there."""
    taken = [pair_medians(s, arm) for s in sessions if not s.voided and arm in s.arms]
    return median(taken[-1]) / min(map(min, filter(None, taken))) if taken and taken[-1] else None


def _below_ceiling(attempt: _Attempt, seat: Seat, session: RaceSession) -> _EndedSession:
    """Void a session in which an arm streamed faster than the probe: one of the two figures is wrong.

    An arm is blamed only if it is also faster than this device has ever read, even with a whole last-level cache of its
    operands still held: a disturbed probe, or a cache that keeps old data, is not the arm's fault.
    """
    probed = session.read_bytes_per_s
    if not probed or session.voided or not session.pairs:
        return _EndedSession(session=session)
    for arm in session.arms:
        times = pair_medians(session, arm)
        rate = seat.moved_bytes(arm) / (median(times) * 1e-9) if times else 0.0
        if rate <= CEILING_SLACK * probed:
            continue
        why = f"{arm} took its operands at {rate / 1e9:.1f} GB/s; a probe read memory at {probed / 1e9:.1f} GB/s"
        certain = (1 - 1 / COLD_OVER_LLC) * rate
        impossible = certain > CEILING_SLACK * max(probed, attempt.contest.read_bytes_per_s)
        found = Mismatch(check="faster than memory", reason=why, evidence={})
        return _EndedSession(session=replace(session, voided=why), too_fast={arm: found} if impossible else {})
    return _EndedSession(session=session)


# --- what follows from a session -------------------------------------------------------------------------------------


def _consequences(attempt: _Attempt, held: _EndedSession, room: Room, terms: RaceTerms) -> Iterator[Disqualified]:
    """Keep the session; renew the room of a voided one; disqualify the arms at fault."""
    session, culprits = held.session, dict(held.culprits)
    attempt.sessions.append(session)
    if session.voided:
        if not session.voided.startswith(BUSY):
            attempt.voids += 1
        elif terms.quiet is None:
            attempt.voids = VOIDS_ALLOWED
        log.info("session voided: %s", session.voided)
        room.renew()
        if attempt.voids >= VOIDS_ALLOWED:
            culprits |= held.too_fast
    for name, mismatch in culprits.items():
        if name not in (attempt.contest.baseline.candidate, CLONE) and name not in attempt.out:
            attempt.out[name] = mismatch.reason
            yield Disqualified(contest=attempt.contest, candidate=name, check=mismatch.check, reason=mismatch.reason)


def _nominate(attempt: _Attempt, terms: RaceTerms) -> None:
    """Choose the next finalist, or record that there is none."""
    if attempt.screening is None:
        attempt.done = True
        return
    fresh = nominees(
        attempt.screening, attempt.contest.incumbent.candidate, attempt.delta, [*attempt.nominees, *attempt.out]
    )
    if not fresh or len(attempt.nominees) >= MAX_ATTEMPTS:
        attempt.done = True
    elif not terms.debit(attempt.contest, fresh[0], attempt.margin):
        attempt.notes.append(f"{fresh[0]} leads, but this key's lifetime error budget is spent")
        attempt.done = True
    else:
        first, *level = leaders(attempt.screening, fresh)
        allowed = [name for name in level if terms.debit(attempt.contest, name, attempt.margin)]
        attempt.finalist, attempt.runner_up = first, allowed[0] if allowed else None
        attempt.nominees.extend(attempt.finalists())


def _advance(attempt: _Attempt, session: RaceSession, terms: RaceTerms) -> None:
    if attempt.runner_up in attempt.out:
        attempt.runner_up = None
    if attempt.finalist in attempt.out:
        attempt.notes.append(f"{attempt.finalist} fell: {attempt.out[attempt.finalist]}")
        _replace_finalist(attempt, terms)
    elif session.voided:
        if attempt.voids >= VOIDS_ALLOWED:
            attempt.notes.append(session.voided)
            attempt.done = True
    else:
        lost = has_lost(session, str(attempt.finalist), attempt.rivals(), attempt.delta)
        attempt.done = lost or len(attempt.confirming) >= SESSIONS
        if attempt.done and not lost:
            attempt.finalist = favoured(attempt.confirming, attempt.finalists(), attempt.rivals(), attempt.delta)


def _replace_finalist(attempt: _Attempt, terms: RaceTerms) -> None:
    """Go on with the runner-up, which was in the same sessions, otherwise with the next nominee."""
    attempt.finalist, attempt.runner_up = attempt.runner_up, None
    if attempt.finalist is None:
        _nominate(attempt, terms)
