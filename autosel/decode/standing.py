"""Who takes the whole step, as a decision that stands: op `step`, mode `team`, kept with its evidence in the ledger.

    standing = stand(scene, fp, ledger, rng, clock, listener)
    standing.team               # True: a decision says the team; False: op by op; None: nothing is decided
    standing.judge(chain, parity)    # race, and record what the samples justify

The rules are those of every race (autosel.race): a screening and three confirming sessions, judged by `judge`, debited
from the key's lifetime error budget. What differs is where a session runs. The weights, gigabytes of them, are the same
tensors for both arms, so that no luck of theirs favours one; what an arm has of its own (its buffers, its program) is
made anew for each session, in this process.

A decision holds for the model's dimensions, the batch, the bucket of context lengths, the threads; and for as long as
the team's kernel and knobs, and what serves every op of the step it was raced against, are what they were.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from autosel import fingerprint
from autosel.candidates.arms import python_digest
from autosel.decode.account import bytes_per_step
from autosel.decode.device import read_windows
from autosel.decode.model import FORMS, Chain
from autosel.decode.run import Listener, Way
from autosel.decode.scene import Clock, Scene
from autosel.decode.step import Call, Step, write_step
from autosel.decode.team import CANDIDATE, ENTRY, KERNELS, SOURCE, TeamStep, knobs_of, supports, write_team
from autosel.decode.whole import Whole
from autosel.errors import LedgerError
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
from autosel.ledger.key import budget_key, current_mode
from autosel.ledger.store import Ledger
from autosel.models.shape import ModelShape
from autosel.native.compile import find_compiler, source_digest
from autosel.race.bench import Disturbance
from autosel.race.idle import wait_until_idle
from autosel.race.judge import has_lost, judge, nominees, pair_medians
from autosel.race.plan import SESSIONS, VOIDS_ALLOWED, Margin, Plan, plan
from autosel.race.session import Duel, Trial, confirm, screen
from autosel.tuning.contend import last_level_bytes
from autosel.values import (
    LENGTH_DIMS,
    WHOLE_STEP,
    Accepted,
    Arm,
    Decision,
    DTypeName,
    Fingerprint,
    NativeRecipe,
    Passed,
    PythonRecipe,
    Race,
    Scalar,
    Session,
    Verdict,
    Workload,
    digest,
    length_bucket,
)

OPS = "ops:step"  # the baseline: op by op, in the forms that were fastest, by whatever serves each op
WRITER = PythonRecipe(target="autosel.decode.step:write_step")
# The smallest gain that can be promoted; below an op's own (2 %), for the arms of a step differ in little of what gives
# a process its luck. Of 49 A/A sessions (llama-1b, 4 layers and 1, the step written twice; 24 pairs; 30 of them beside
# other work) one crossed: with 95 % confidence fewer than one in ten do.
MARGIN = Margin(delta=0.01, alpha_session=0.05, pi=0.1, calibrated=True)
CEILING_SLACK = 1.1
CACHES = 3  # a step that moves less than so many last-level caches may find its weights in them
# So long may a race of steps go on for its tail alone: of a step of 50 ms, 200 samples of each arm.
TAIL_S = 20.0
REST = timedelta(hours=1)  # for so long an undecided step is not raced again


def workload_of(shape: ModelShape, dtype: DTypeName, batch: int, context: int) -> Workload:
    """The step of these layers: what differs in any dimension or trait is another computation."""
    sizes = {"B": batch, "layers": shape.layers, "d": shape.d, "I": shape.I, "Hq": shape.Hq, "Hkv": shape.Hkv}
    traits: dict[str, Any] = {"activation": shape.activation}
    traits |= {"sliding": shape.sliding_layers, "window": shape.window} if shape.window else {}
    traits |= {name: True for name in ("qk_norm", "sandwich") if getattr(shape, name)}
    return Workload(
        op=WHOLE_STEP,
        dims=(*sizes.items(), ("D", shape.D), ("V", shape.V), ("L", context)),
        dtype=dtype,
        traits=tuple(sorted(traits.items())),
    )


# --- the two arms ----------------------------------------------------------------------------------------------------


def team_arm(step: Step, fp: Fingerprint) -> Arm:
    """The team that would be written from the step's list, as it would be compiled."""
    knobs = {c.workload.bucket: knobs_of(_at_longest(c), fp) for c in step.calls if c.workload and c.op in KERNELS}
    flags = (*ISA_FLAGS[facts(fp).isa], f"-DAUTOSEL_{step.decoder.weights.dtype.upper()}")
    threads = max(int(k.get("threads", 1)) for k in knobs.values())
    settings: dict[str, Scalar] = {"threads": threads, "knobs": digest(knobs)[:12]}
    build = source_digest(SOURCE, flags)
    return Arm(
        candidate=CANDIDATE,
        backend="CPP",
        recipe=NativeRecipe(source=SOURCE, entry=ENTRY, flags=flags),
        knobs=settings,
        digest=digest({"source": build, "knobs": settings}),
        build=build,
    )


def _at_longest(call: Call) -> Call:
    """At its bucket's longest context: a decision is about a bucket, and knobs that are derived differ within it."""
    w = call.workload
    if w is None or not LENGTH_DIMS & {name for name, _ in w.dims}:
        return call
    return replace(call, workload=w.at(L=length_bucket(w["L"])[1]))


def ops_arm(steps: Sequence[Step]) -> Arm:
    """The step op by op. What serves an op in any of the forms is part of it: another decision makes another arm."""
    served = {}
    for call in (c for step in steps for c in step.calls if c.workload is not None):
        decision = getattr(call.function, "decision", None)
        candidate = getattr(call.function, "candidate", "")
        own = decision is not None and decision.arm.candidate == candidate
        served[call.workload.bucket] = decision.arm.digest if own else candidate  # type: ignore[union-attr]
    settings: dict[str, Scalar] = {"served": digest(served)[:12]}
    source = python_digest(WRITER)
    return Arm(
        candidate=OPS,
        backend="CPP",
        recipe=WRITER,
        knobs=settings,
        digest=digest({"source": source, "knobs": settings}),
    )


# --- what stands -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Standing:
    """The question for one scene, and its answer if there is one."""

    scene: Scene
    fp: Fingerprint
    ledger: Ledger
    rng: Random
    clock: Clock
    listener: Listener
    workload: Workload
    mode: str
    arm: Arm
    baseline: Arm
    known: Decision | None
    decides: bool

    @property
    def team(self) -> bool | None:
        """Does a decision say that the team takes the step? None: none does."""
        return None if self.known is None else self.known.arm.candidate == CANDIDATE

    def kept(self) -> Whole:
        """Op by op, by the decision that stands."""
        assert self.known is not None
        return _whole(self.known)

    def judge(self, chain: Chain, parity: Passed) -> Whole | None:
        """As the decision says; else race, record and obey. None where nothing is to be recorded, or can be."""
        held = self.ledger.quarantined(self.fp.hw_id, WHOLE_STEP)
        stopped = held.get(self.arm.build) or held.get(self.arm.digest)
        if stopped is not None:
            return Whole(taken=False, note=f"no thread team: in quarantine: {stopped.reason}")
        if self.known is not None:
            return _whole(self.known)
        if not self.decides or not self.ledger.writable:
            return None
        try:
            with self.ledger.lock(self.fp.hw_id, fingerprint.unit(self.scene.plan.device)):
                return _whole(self._decide(chain, parity))
        except LedgerError as error:
            return Whole(taken=False, note=f"no thread team: it could not be decided: {error.what}")

    def _decide(self, chain: Chain, parity: Passed) -> Decision:
        with self.ledger.trial(self.fp.hw_id, WHOLE_STEP, self.arm):
            race = self._race(chain)
        verdict = _with_roofline(judge(race), bytes_of(self.scene))
        promoted = verdict.outcome == "promote"
        return self.ledger.record(
            self.fp,
            self.workload,
            verdict=verdict,
            race=race,
            parities=[(self.arm, parity)],
            arm=self.arm if promoted else self.baseline,
            baseline=self.baseline,
            mode=self.mode,
            state="promoted" if promoted else "kept",
            reason=verdict.reason,
            idempotency_key=digest({"race": digest(race), "arms": [self.arm.digest, self.baseline.digest]}),
        )

    def _race(self, chain: Chain) -> Race:
        def debit(candidate: str) -> bool:
            key = budget_key(self.fp.hw_id, self.workload)
            return self.ledger.spend(key, MARGIN.false_promotion_bound, candidate)

        def watch(kind: str, session: Session) -> None:
            self.listener.stage("step", f"{kind}, {len(session.pairs)} pairs of whole steps", 0, 1)

        scene = self.scene

        def arms() -> Mapping[str, Step | TeamStep]:
            ops = write_step(scene.decoder, scene.cache, scene.place, chain)
            team = write_team(write_step(scene.decoder, scene.cache, scene.place), self.fp)
            return {OPS: ops, CANDIDATE: team}

        moved = bytes_of(scene)
        streams = moved > CACHES * last_level_bytes(self.fp)
        terms = Terms(
            arms=arms, clock=self.clock, debit=debit, watch=watch, rng=self.rng, streamed_bytes=moved if streams else 0
        )
        return race(self.workload, terms)


def bytes_of(scene: Scene) -> int:
    return bytes_per_step(scene.plan.shape, scene.plan.dtype, scene.plan.batch, scene.place.longest)


def stand(
    scene: Scene,
    fp: Fingerprint,
    ledger: Ledger,
    rng: Random,
    clock: Clock,
    listener: Listener,
    *,
    decides: bool = True,
) -> Standing | None:
    """What is decided about the scene's step; None where no team can take it. `decides`: may it be raced?"""
    plan, decoder = scene.plan, scene.decoder
    if not isinstance(supports(plan), Accepted) or find_compiler() is None:
        return None
    forms = [form for form in FORMS if form != "added" or not decoder.shape.sandwich]
    steps = {form: write_step(decoder, scene.cache, scene.place, Chain(attn=form, mlp=form)) for form in forms}
    w = workload_of(plan.shape, plan.dtype, plan.batch, plan.seq)
    arm, baseline = team_arm(steps["fused"], fp), ops_arm(list(steps.values()))
    mode = current_mode("team")
    found = ledger.known(fp.hw_id, w.bucket, mode, (arm.digest, baseline.digest))
    found = found or _fresh_doubt(ledger, fp.hw_id, w.bucket, mode, {arm.digest, baseline.digest})
    return Standing(
        scene=scene,
        fp=fp,
        ledger=ledger,
        rng=rng,
        clock=clock,
        listener=listener,
        workload=w,
        mode=mode,
        arm=arm,
        baseline=baseline,
        known=found,
        decides=decides,
    )


def _fresh_doubt(ledger: Ledger, hw_id: str, bucket: str, mode: str, now: set[str]) -> Decision | None:
    """What was left undecided less than REST ago, about these very arms: not every run of a row pays for a race."""
    for d in ledger.serving_rows(hw_id, bucket, mode):
        undecided = d.verdict is not None and d.verdict.outcome == "undecided"
        fresh = datetime.now(UTC) - datetime.fromisoformat(d.created_at) < REST
        entrants = {a.digest for a, _ in ledger.evidence(d.id).parities} | {d.arm.digest, d.baseline.digest}
        if undecided and fresh and entrants == now:
            return d
    return None


def _whole(decision: Decision) -> Whole:
    """What to do by the decision; its race is why."""
    taken = decision.arm.candidate == CANDIDATE
    timings = decision.verdict.timings if decision.verdict else {}
    ways: tuple[Way, ...] = ()
    if OPS in timings and CANDIDATE in timings:
        ways = (
            Way(half="step", form="ops", step_us=timings[OPS].median_us, taken=not taken),
            Way(half="step", form="team", step_us=timings[CANDIDATE].median_us, taken=taken),
        )
    who = "by one thread team" if taken else "op by op"
    return Whole(taken=taken, ways=ways, note=f"the step {who}, by decision {decision.id}: {decision.reason}")


def _with_roofline(verdict: Verdict, moved: int) -> Verdict:
    """Fraction of what the read rate of this very race allows."""
    if not verdict.read_bytes_per_s or verdict.winner not in verdict.timings:
        return verdict
    floor_us = moved / verdict.read_bytes_per_s * 1e6
    return replace(verdict, roofline=floor_us / verdict.timings[verdict.winner].median_us)


# --- the race --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """`arms` writes both steps anew. `streamed_bytes`: what a step must read from memory; 0 where it may find its
    weights in a cache."""

    arms: Callable[[], Mapping[str, Step | TeamStep]]
    clock: Clock
    debit: Callable[[str], bool]
    watch: Callable[[str, Session], None]
    rng: Random
    streamed_bytes: int


class _Steps:
    """The arms of one session, timed in this process."""

    def __init__(self, arms: Mapping[str, Step | TeamStep], clock: Clock, *, wake: bool = True) -> None:
        self.arms, self.clock, self.wake = arms, clock, wake
        for step in arms.values():
            step.run()

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[Mapping[str, Sequence[float]], str]:
        before = Disturbance.read()
        return {arm: [self._sample(arm, calls, i) for i in range(samples)] for arm in order}, before.since()

    def _sample(self, arm: str, calls: int, number: int) -> float:
        step = self.arms[arm]
        wait_until_idle()  # threads of PyTorch's that another step left looking for work would take our cores
        if self.wake and number == 0:
            step.run()
        begin = self.clock()
        for _ in range(calls):
            step.run()
        return (self.clock() - begin) / calls

    def probe(self) -> float:
        return max(read_windows())


def race(w: Workload, terms: Terms) -> Race:
    """The team against the step op by op: a screening session, then three that confirm, or as many as it takes to
    lose. A session faster than memory allows is void, and the third void one ends the race."""
    made = _Attempt(terms)
    screening = made.take(lambda steps, trial: screen(steps, (OPS, CANDIDATE), trial), "screening")
    found = nominees(screening, OPS, MARGIN.delta) if screening is not None else []
    notes, finalist = [], None
    if found and terms.debit(CANDIDATE):
        finalist = CANDIDATE
    elif found:
        notes.append(f"{CANDIDATE} leads, but this key's lifetime error budget is spent")
    if screening is not None and finalist is not None:
        made.confirm(screening)
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

    def take(self, session: Callable[[_Steps, Trial], Session], kind: str) -> Session | None:
        """One session that counts, on steps written anew; None when too many were void."""
        terms = self.terms

        def watch(so_far: Session) -> None:
            terms.watch(kind, so_far)

        while self.voids < VOIDS_ALLOWED:
            trial = Trial(plan=self.plan, delta=MARGIN.delta, seed=terms.rng.getrandbits(32), watch=watch)
            taken = session(_Steps(terms.arms(), terms.clock, wake=self.plan.wakes), trial)
            found = _below_ceiling(taken, terms.streamed_bytes)
            self.sessions.append(found)
            if not found.voided:
                return found
            self.voids += 1
        return None

    def confirm(self, screening: Session) -> None:
        duel = Duel(arms=(OPS, CANDIDATE), finalist=CANDIDATE, rivals=(OPS,))
        for number in range(SESSIONS):
            earlier = [s for s in self.sessions if s.kind == "confirming" and not s.voided]
            found = self.take(
                lambda steps, trial, earlier=earlier: confirm(steps, duel, trial, screening, earlier),  # type: ignore[misc]
                f"confirming {number + 1}",
            )
            if found is None or has_lost(found, CANDIDATE, [OPS], MARGIN.delta):
                return


def _baseline_ns(terms: Terms) -> float:
    steps = _Steps({OPS: terms.arms()[OPS]}, terms.clock)
    times, _ = steps.pair([OPS], 1, 3)
    return statistics.median(times[OPS])


def _affordable(found: Plan, base_ns: float) -> Plan:
    """The tail's samples cut to TAIL_S; a tail that they do not settle stays unsettled."""
    return replace(found, tail_samples=min(found.tail_samples, max(1, int(TAIL_S * 1e9 / (2 * base_ns)))))


def _below_ceiling(session: Session, moved: int) -> Session:
    """Void a session in which an arm moved its bytes faster than memory was read beside it."""
    for arm in session.arms if moved and session.pairs and not session.voided else ():
        rate = moved / (statistics.median(pair_medians(session, arm)) * 1e-9)
        if session.read_bytes_per_s and rate > CEILING_SLACK * session.read_bytes_per_s:
            why = f"{arm} moved {rate / 1e9:.1f} GB/s; memory read beside it at {session.read_bytes_per_s / 1e9:.1f}"
            return replace(session, voided=why)
    return session
