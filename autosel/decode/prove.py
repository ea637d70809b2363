"""Parity of the forms of a step: each must give the logits of the step op by op, from the same state.

The bits must be equal, or the distance from a pass in higher precision within the bound of a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from autosel.decode.graph import GraphStep
from autosel.decode.hold import holding, refuse_held
from autosel.decode.packed import pack
from autosel.decode.persistent import AnyStep
from autosel.decode.question import Question
from autosel.decode.run import WHOLE, Chain, StepForm
from autosel.decode.scene import Scene, judged
from autosel.decode.step import Step, fresh_logits, write_step
from autosel.decode.torch_step import AS_PYTORCH, TorchStep
from autosel.decode.weights import reference_bytes
from autosel.errors import BuildError, DeviceFault, ParityError, UsageError
from autosel.ledger.store import Ledger
from autosel.values import Decision, Passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The forms that may run the step: op by op, then those that passed. `note` says why others did not."""

    steps: Mapping[StepForm, AnyStep] = field(default_factory=dict)
    proofs: Mapping[StepForm, Passed] = field(default_factory=dict)
    note: str = ""


def prove(scene: Scene, ledger: Ledger | None, chain: Chain, question: Question, *, willing: bool = False) -> Proven:
    """Prove each form that may be tried. A form that faults is put in quarantine.

    `willing`: also a whole step that promises little. Weights are packed unless a decision excludes it. Raises
    BuildError, DeviceFault, ParityError, UsageError if the form that the plan requires fails.
    """
    unpacked = question.form == "whole"
    forms = [form for form in question.forms if not (unpacked and form == "packed")]
    if question.known is not None:  # a known decision for a whole step needs only its own proof
        forms = [form for form in forms if form in WHOLE]
    notes = [_refusal(scene, form, why) for form, why in question.refused.items() if not unpacked]
    if not forms:
        return Proven(note="; ".join(notes))
    ops = write_step(scene.decoder, scene.cache, scene.place, chain)
    doubted = "whole" in forms and question.form not in WHOLE and not willing
    if doubted and (why := _reluctance(scene, ledger, ops)):
        forms = [form for form in forms if form not in WHOLE]
        notes.append(f"no {scene.kind.name}: {why}; use --step whole to require it")
    steps: dict[StepForm, AnyStep] = {"ops": ops}
    proofs: dict[StepForm, Passed] = {}
    for form in forms:
        try:
            steps[form], proofs[form] = _proven(scene, ledger, ops, form, question)
        except (BuildError, DeviceFault, ParityError, UsageError) as error:
            if form == scene.plan.step:
                raise
            notes.append(_refusal(scene, form, error.why or error.what))
    return Proven(steps=steps, proofs=proofs, note="; ".join(notes))


def _reluctance(scene: Scene, ledger: Ledger | None, ops: Step) -> str:
    """Return why an undecided whole step promises too little to be compiled without a request, or ""."""
    if scene.plan.step == "whole":
        return ""
    fused = write_step(scene.decoder, scene.cache, scene.place)
    return scene.kind.reluctant(ops, fused, scene.plan, scene.fp, partial(proven_beside, ledger))


def proven_beside(ledger: Ledger | None, decision: Decision | None) -> frozenset[str]:
    """Return the candidates that passed the checks of a decision, whichever won its race; none if it was withdrawn."""
    if ledger is None or decision is None or decision.state not in ("kept", "promoted"):
        return frozenset()
    found = ledger.evidence(decision.id).parities
    return frozenset(arm.candidate for arm, parity in found if isinstance(parity, Passed))


def _refusal(scene: Scene, form: StepForm, why: str) -> str:
    name = {"graph": "graph", "packed": "packed weights"}.get(form, scene.kind.name)
    return f"no {name}: {why}"


def _proven(
    scene: Scene, ledger: Ledger | None, ops: Step, form: StepForm, question: Question
) -> tuple[AnyStep, Passed]:
    """Return the step in this form, and its proof."""
    arm = question.arms.get(form)
    digests = {arm.digest, arm.build} if arm is not None else set()
    if form == "torch":
        return _as_it_was(scene)
    if form == "graph":
        refuse_held(ledger, scene.fp, "the graph", digests)
        captured = GraphStep.of(ops)
        return captured, _refuse_other_logits(scene, ops, captured, "the graph")
    if form == "packed":
        pack(scene.decoder.weights, scene.fp, to_come_bytes=reference_bytes(scene.plan))
    whole = scene.kind.write(write_step(scene.decoder, scene.cache, scene.place), scene.fp, form)
    with holding(ledger, scene.fp, whole, {whole.build, *digests}):
        return whole, _refuse_other_logits(scene, ops, whole, whole.candidate)


def _as_it_was(scene: Scene) -> tuple[TorchStep, Passed]:
    """Return PyTorch's step, the baseline of the others, with its own distance from the reference as its proof."""
    step = TorchStep.of(write_step(scene.decoder, scene.cache, scene.place, AS_PYTORCH))
    logits = fresh_logits(step)
    error, bound = judged(logits, logits, scene.reference(), scene.plan.dtype)
    return step, Passed(cases=1, worst=error / bound, worst_case="logits against a pass in higher precision")


def _refuse_other_logits(scene: Scene, ops: Step, other: AnyStep, name: str) -> Passed:
    """Compare logits with the step op by op. Raises ParityError, DeviceFault."""
    expected = fresh_logits(ops).clone()  # cloned, because a graph writes into the list's buffers
    found = fresh_logits(other)
    if torch.equal(expected, found):
        return Passed(cases=1, worst=0.0, worst_case="the logits of the step op by op, bit for bit")
    error, bound = judged(found, expected, scene.reference(), scene.plan.dtype)
    if not error <= bound:
        raise ParityError(
            f"the logits of {name} differ from the step op by op",
            why=f"the error against the reference is {error:.3g}; {bound:.3g} is allowed",
            todo="use --step ops, and report this",
        )
    return Passed(cases=1, worst=error / bound, worst_case="logits against a pass in higher precision")
