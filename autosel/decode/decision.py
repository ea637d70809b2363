"""Race the forms of a step and record the verdict: op `step`, mode `team`.

    decision = decide(scene, ledger, question, chain, proofs)

race.py times the forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from autosel import fingerprint
from autosel.decode.question import Question
from autosel.decode.race import Steps, race_of
from autosel.decode.run import Chain, StepForm
from autosel.decode.scene import Scene
from autosel.ledger.commands import Record
from autosel.ledger.store import Ledger
from autosel.race.judge import judge
from autosel.values import WHOLE_STEP, Decision, Passed, Verdict, digest


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
            race = race_of(steps, question, raced)
        verdict = judge(race)
        verdict = _with_roofline(verdict, steps.moved.get(verdict.winner, 0))
        promoted, baseline = verdict.outcome == "promote", arms["ops"]
        digests = tuple(arm.digest for arm in question.contested.values())
        return ledger.write(
            Record(
                fp=scene.fp,
                workload=question.workload,
                verdict=verdict,
                race=race,
                parities=tuple(zip(raced, proofs.values(), strict=True)),
                arm=next(a for a in raced if a.candidate == verdict.winner) if promoted else baseline,
                baseline=baseline,
                entrants=digests,  # also those that could not be built, or promised too little
                mode=question.mode,
                state="promoted" if promoted else "kept",
                reason=verdict.reason,
                idempotency_key=digest({"race": digest(race), "arms": digests}),
            )
        )


def _with_roofline(verdict: Verdict, moved: int) -> Verdict:
    """Add the fraction of the limit given by the read rate of this race."""
    if not verdict.read_bytes_per_s or verdict.winner not in verdict.timings:
        return verdict
    floor_us = moved / verdict.read_bytes_per_s * 1e6
    return replace(verdict, roofline=floor_us / verdict.timings[verdict.winner].median_us)
