"""Which form of the step is decided: op `step`, mode `team`, kept with its evidence in the ledger.

    question = ask(scene, ledger)                             # Question; None: nothing to ask
    question.form                                             # what a decision says; None: nothing is decided
    decide(scene, ledger, question, chain, proofs)            # race, and record what the samples justify

A decision holds for the model's dimensions, the batch, the bucket of context lengths, the threads; and for as long as
every form that could be taken (entrants.py), and what serves every op of the step they were raced against, are what
they were. How they are raced is race.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from autosel import fingerprint
from autosel.decode.entrants import arms_of, form_of
from autosel.decode.persistent import kind_of
from autosel.decode.race import MARGIN, Steps
from autosel.decode.run import Chain, StepForm, Way
from autosel.decode.scene import Scene
from autosel.ledger.key import budget_key, current_mode
from autosel.ledger.store import Ledger
from autosel.models.shape import ModelShape
from autosel.race.contest import Contest, Entrant
from autosel.race.judge import judge
from autosel.race.plan import Margin
from autosel.race.run import Disqualified, Terms, Tick, run
from autosel.tuning.contend import TIME_CLASSES, last_level_bytes
from autosel.values import (
    WHOLE_STEP,
    Accepted,
    Arm,
    Decision,
    DTypeName,
    Passed,
    Race,
    Rejected,
    Verdict,
    Workload,
    digest,
)

PACKED_TOLD = "by one thread team, from packed weights"
REST = timedelta(hours=1)  # for so long an undecided step is not raced again


# --- what is known ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which of these arms takes the step, and the answer if there is one."""

    workload: Workload
    mode: str
    arms: Mapping[StepForm, Arm]
    known: Decision | None
    crowded: bool  # no room for packed weights, for now: then nothing is decided about them

    @property
    def form(self) -> StepForm | None:
        """The form that a decision says; None: none does."""
        return form_of(self.known.arm.candidate) if self.known is not None else None

    def told(self, decision: Decision, whole: str) -> tuple[StepForm, list[Way], str]:
        """The form that the decision says, the forms that it was raced against, and a note of it. `whole`: what the
        device is called that takes a step whole."""
        taken = form_of(decision.arm.candidate)
        timings = decision.verdict.timings if decision.verdict else {}
        timed = {form: timings[arm.candidate] for form, arm in self.arms.items() if arm.candidate in timings}
        ways = [Way.of_step(form, t.median_us, taken=form == taken) for form, t in timed.items()]
        who = {"ops": "op by op", "graph": "as a graph of its ops", "packed": PACKED_TOLD}.get(taken, f"by one {whole}")
        note = f"the step {who}, by decision {decision.id}: {decision.reason}"
        return taken, ways if len(ways) > 1 else [], note


def ask(scene: Scene, ledger: Ledger | None) -> Question | None:
    """Return what is decided about the scene's step; None where there is no ledger, the plan says how the step is
    taken, or one form alone can take it."""
    plan, kind = scene.plan, kind_of(scene.plan.device)
    if ledger is None or plan.step != "auto" or not plan.listed:
        return None
    arms = arms_of(scene)
    forbidden = plan.layout == "plain" and isinstance(kind.packs(replace(plan, layout="auto"), scene.fp), Accepted)
    if len(arms) == 1 or forbidden:
        return None
    w, hw_id = workload_of(plan.shape, plan.dtype, plan.batch, plan.seq), scene.fp.hw_id
    mode, digests = current_mode("team"), {arm.digest for arm in arms.values()}
    found = ledger.known(hw_id, w.bucket, mode, digests)
    crowded = "packed" in arms and isinstance(kind.room(plan, scene.decoder.weights), Rejected)
    if found is None and crowded:
        digests = digests - {arms["packed"].digest}
        found = ledger.known(hw_id, w.bucket, mode, digests)
    found = found or _fresh_doubt(ledger, hw_id, w.bucket, mode, digests)
    return Question(workload=w, mode=mode, arms=arms, known=found, crowded=crowded)


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


def _fresh_doubt(ledger: Ledger, hw_id: str, bucket: str, mode: str, now: set[str]) -> Decision | None:
    """What was left undecided less than REST ago, about these very arms: not every run of a row pays for a race."""
    for d in ledger.serving_rows(hw_id, bucket, mode):
        undecided = d.verdict is not None and d.verdict.outcome == "undecided"
        fresh = datetime.now(UTC) - datetime.fromisoformat(d.created_at) < REST
        entrants = {a.digest for a, _ in ledger.evidence(d.id).parities} | {d.arm.digest, d.baseline.digest}
        if undecided and fresh and entrants <= now:
            return d
    return None


# --- a new decision --------------------------------------------------------------------------------------------------


def decide(
    scene: Scene, ledger: Ledger, question: Question, chain: Chain, proofs: Mapping[StepForm, Passed]
) -> Decision:
    """Race the proven forms against the step op by op, and record the verdict.

    A form that faults is put in quarantine and left out. Raises LedgerError, EnvironmentFault.
    """
    hw_id, arms = scene.fp.hw_id, question.arms
    raced = [arms[form] for form in proofs]
    steps = Steps(scene=scene, chain=chain, arms={arm.candidate: arm for arm in arms.values()}, ledger=ledger)
    with ledger.lock(hw_id, fingerprint.unit(scene.plan.device)):
        with ExitStack() as trials:
            for arm in raced:
                trials.enter_context(ledger.trial(hw_id, WHOLE_STEP, arm))
            race = _raced(steps, question, raced)
        verdict = judge(race)
        verdict = _with_roofline(verdict, steps.moved.get(verdict.winner, 0))
        promoted, baseline = verdict.outcome == "promote", arms["ops"]
        digests = [arm.digest for form, arm in arms.items() if form != "packed" or not question.crowded]
        return ledger.record(
            scene.fp,
            question.workload,
            verdict=verdict,
            race=replace(race, notes=(*filter(None, [steps.told]), *race.notes)),
            parities=list(zip(raced, proofs.values(), strict=True)),
            arm=next(a for a in raced if a.candidate == verdict.winner) if promoted else baseline,
            baseline=baseline,
            entrants=digests,  # those too that could not be written, or promised too little
            mode=question.mode,
            state="promoted" if promoted else "kept",
            reason=verdict.reason,
            idempotency_key=digest({"race": digest(race), "arms": digests}),
        )


def _raced(steps: Steps, question: Question, challengers: Sequence[Arm]) -> Race:
    """Race the challengers in this process."""
    scene, ledger = steps.scene, steps.ledger

    def debit(contest: Contest, candidate: str, allowed: Margin) -> bool:
        assert ledger is not None
        return ledger.spend(budget_key(scene.fp.hw_id, contest.workload), allowed.false_promotion_bound, candidate)

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
        read_bytes_per_s=math.inf,  # a step that is faster than a probe is believed no more than the probe
    )
    for found in run([contest], Terms(rng=scene.rng, debit=debit, progress=progress), steps):
        if not isinstance(found, Disqualified):
            return found[1]
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


def _with_roofline(verdict: Verdict, moved: int) -> Verdict:
    """Fraction of what the read rate of this very race allows."""
    if not verdict.read_bytes_per_s or verdict.winner not in verdict.timings:
        return verdict
    floor_us = moved / verdict.read_bytes_per_s * 1e6
    return replace(verdict, roofline=floor_us / verdict.timings[verdict.winner].median_us)
