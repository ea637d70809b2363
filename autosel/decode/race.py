"""A race of whole steps: every way to take one against the step op by op, in this process.

The rules are those of every race (autosel.race): a screening and three confirming sessions, judged by `judge`. What
differs is where a session runs. The weights, gigabytes of them, are the same tensors for all arms, so that no luck of
theirs favours one; what an arm has of its own (its buffers, its program, its graph) is made anew for each session.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from autosel.decode.device import read_windows
from autosel.decode.entrants import OPS
from autosel.decode.graph import GraphStep
from autosel.decode.scene import Clock
from autosel.decode.step import Step, WholeStep
from autosel.race.bench import Disturbance
from autosel.race.idle import wait_until_idle
from autosel.race.judge import has_lost, nominees, pair_medians
from autosel.race.plan import SESSIONS, VOIDS_ALLOWED, Margin, Plan, plan
from autosel.race.session import Duel, Trial, confirm, screen
from autosel.values import Race, Session, Workload

# The smallest gain that can be promoted; below an op's own (2 %), for the arms of a step differ in little of what gives
# a process its luck. Of 49 A/A sessions (llama-1b, 4 layers and 1, the step written twice; 24 pairs; 30 of them beside
# other work) one crossed: with 95 % confidence fewer than one in ten do.
MARGIN = Margin(delta=0.01, alpha_session=0.05, pi=0.1, calibrated=True)
CEILING_SLACK = 1.1
# So long may a race of steps go on for its tail alone: of a step of 50 ms, 200 samples of each arm.
TAIL_S = 20.0

Steps = Mapping[str, Step | GraphStep | WholeStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """`arms` writes the steps of these names anew. `streamed_bytes`: what each step that was written must read from
    memory; empty where it may find its weights in a cache."""

    arms: Callable[[Sequence[str]], Steps]
    device: str
    clock: Clock
    debit: Callable[[str], bool]
    watch: Callable[[str, Session], None]
    rng: Random
    streamed_bytes: Mapping[str, int]


class _Steps:
    """The arms of one session, timed in this process."""

    def __init__(self, arms: Steps, terms: Terms, *, wake: bool = True) -> None:
        self.arms, self.clock, self.device, self.wake = arms, terms.clock, terms.device, wake
        for step in arms.values():
            step.run()
            step.settle()

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        before = Disturbance.read()
        return {arm: [self._sample(arm, calls, i) for i in range(samples)] for arm in order}, before.since()

    def _sample(self, arm: str, calls: int, number: int) -> float:
        step = self.arms[arm]
        wait_until_idle()  # threads of PyTorch's that another step left looking for work would take our cores
        if self.wake and number == 0:
            step.run()
            step.settle()
        begin = self.clock()
        for _ in range(calls):
            step.run()
            step.settle()
        return (self.clock() - begin) / calls

    def probe(self) -> float:
        return max(read_windows(self.device))


def race(w: Workload, challengers: Sequence[str], terms: Terms) -> Race:
    """Each challenger against the step op by op: a screening session of all, then three that confirm the fastest, or as
    many as it takes to lose. A session faster than memory allows is void, and the third void one ends the race."""
    made, names = _Attempt(terms), (OPS, *challengers)
    screening = made.take(names, lambda steps, trial: screen(steps, names, trial), "screening")
    found = nominees(screening, OPS, MARGIN.delta) if screening is not None else []
    notes, finalist = [], None
    if found and terms.debit(found[0]):
        finalist = found[0]
    elif found:
        notes.append(f"{found[0]} leads, but this key's lifetime error budget is spent")
    if screening is not None and finalist is not None:
        made.confirm(screening, finalist)
    return Race(
        workload=w,
        baseline=OPS,
        incumbent=OPS,
        finalist=finalist,
        delta=MARGIN.delta,
        alpha_session=MARGIN.alpha_session,
        pi=MARGIN.pi,
        sessions=tuple(made.sessions),
        time_class=made.plan.time_class,
        nominees=tuple(found),
        notes=tuple(notes),
    )


class _Attempt:
    """The sessions so far."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.sessions: list[Session] = []
        self.voids = 0
        base_ns = _baseline_ns(terms)
        self.plan = _affordable(plan(base_ns), base_ns)

    def take(self, names: Sequence[str], session: Callable[[_Steps, Trial], Session], kind: str) -> Session | None:
        """One session of these arms that counts, on steps written anew; None when too many were void."""
        terms = self.terms

        def watch(so_far: Session) -> None:
            terms.watch(kind, so_far)

        while self.voids < VOIDS_ALLOWED:
            trial = Trial(plan=self.plan, delta=MARGIN.delta, seed=terms.rng.getrandbits(32), watch=watch)
            taken = session(_Steps(terms.arms(names), terms, wake=self.plan.wakes), trial)
            found = _below_ceiling(taken, terms.streamed_bytes)
            self.sessions.append(found)
            if not found.voided:
                return found
            self.voids += 1
        return None

    def confirm(self, screening: Session, finalist: str) -> None:
        duel = Duel(arms=(OPS, finalist), finalist=finalist, rivals=(OPS,))
        for number in range(SESSIONS):
            earlier = [s for s in self.sessions if s.kind == "confirming" and not s.voided]
            found = self.take(
                duel.arms,
                lambda steps, trial, earlier=earlier: confirm(steps, duel, trial, screening, earlier),  # type: ignore[misc]
                f"confirming {number + 1}",
            )
            if found is None or has_lost(found, finalist, [OPS], MARGIN.delta):
                return


def _baseline_ns(terms: Terms) -> float:
    steps = _Steps(terms.arms((OPS,)), terms)
    times, _ = steps.pair([OPS], 1, 3)
    return statistics.median(times[OPS])


def _affordable(found: Plan, base_ns: float) -> Plan:
    """The tail's samples cut to TAIL_S; a tail that they do not settle stays unsettled."""
    return replace(found, tail_samples=min(found.tail_samples, max(1, int(TAIL_S * 1e9 / (2 * base_ns)))))


def _below_ceiling(session: Session, moved: Mapping[str, int]) -> Session:
    """Void a session in which an arm moved its bytes faster than memory was read beside it."""
    for arm in session.arms if moved and session.pairs and not session.voided else ():
        rate = moved[arm] / (statistics.median(pair_medians(session, arm)) * 1e-9)
        if session.read_bytes_per_s and rate > CEILING_SLACK * session.read_bytes_per_s:
            why = f"{arm} moved {rate / 1e9:.1f} GB/s; memory read beside it at {session.read_bytes_per_s / 1e9:.1f}"
            return replace(session, voided=why)
    return session
