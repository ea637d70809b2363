"""Race the forms of a step, and record what the samples justify: op `step`, mode `team`.

    decision = decide(scene, ledger, question, chain, proofs)

How they are timed is race.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from autosel import fingerprint
from autosel.decode.question import Question
from autosel.decode.race import MARGIN, Steps
from autosel.decode.run import Chain, StepForm
from autosel.decode.scene import Scene
from autosel.ledger.key import budget_key
from autosel.ledger.store import Ledger
from autosel.race.contest import Contest, Entrant
from autosel.race.judge import judge
from autosel.race.plan import Margin
from autosel.race.run import Disqualified, Terms, Tick, run
from autosel.tuning.contend import TIME_CLASSES, last_level_bytes
from autosel.values import WHOLE_STEP, Arm, Decision, Passed, Race, Verdict, digest


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
        digests = [arm.digest for arm in question.contested.values()]
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
