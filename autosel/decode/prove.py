"""Parity of the forms of a step: each must give the logits of the step op by op, from the same state.

The same bits, or else as close to a pass in higher precision as the judge of a measurement asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autosel.decode import graph
from autosel.decode.decision import Question
from autosel.decode.graph import GraphStep
from autosel.decode.hold import holding, refuse_held
from autosel.decode.persistent import kind_of
from autosel.decode.run import WHOLE, Chain, StepForm
from autosel.decode.scene import Scene, judged
from autosel.decode.step import Step, WholeStep, write_step
from autosel.errors import BuildError, DeviceFault, ParityError, UsageError
from autosel.ledger.store import Ledger
from autosel.values import Accepted, Passed, Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The forms that may take the step: op by op first, then those that passed. `note`: why others did not."""

    steps: Mapping[StepForm, Step | GraphStep | WholeStep] = field(default_factory=dict)
    proofs: Mapping[StepForm, Passed] = field(default_factory=dict)
    note: str = ""


def prove(scene: Scene, ledger: Ledger | None, chain: Chain, question: Question | None) -> Proven:
    """Prove each form that the plan allows and the device can run. What faults meanwhile is put in quarantine.

    Weights are packed unless a decision says that the step is taken without. Raises BuildError, DeviceFault,
    ParityError, UsageError if the form that the plan asks for fails.
    """
    forms, notes = _allowed(scene, question)
    if not forms:
        return Proven(note="; ".join(notes))
    ops = write_step(scene.decoder, scene.cache, scene.place, chain)
    forms, why = _worthwhile(scene, ops, forms)
    notes += [why] if why else []
    steps: dict[StepForm, Step | GraphStep | WholeStep] = {"ops": ops}
    proofs: dict[StepForm, Passed] = {}
    for form in forms:
        try:
            steps[form], proofs[form] = _proven(scene, ledger, ops, form, question)
        except (BuildError, DeviceFault, ParityError, UsageError) as error:
            if form == scene.plan.step:
                raise
            notes.append(f"no {_called(scene, form)}: {error.why or error.what}")
    return Proven(steps=steps, proofs=proofs, note="; ".join(notes))


def _allowed(scene: Scene, question: Question | None) -> tuple[list[StepForm], list[str]]:
    """The forms to try besides op by op, and why the device cannot take the step whole."""
    plan, kind = scene.plan, kind_of(scene.plan.device)
    forms: list[StepForm] = ["graph"] if plan.step != "ops" and isinstance(graph.supports(plan), Accepted) else []
    if plan.step in ("ops", "graph"):
        return forms, []
    support = kind.supports(plan)
    if isinstance(support, Rejected):
        return forms, [f"no {kind.name}: {support.reason}"]
    unpacked = question is not None and question.form == "whole"
    if unpacked or isinstance(kind.packs(plan, scene.fp), Rejected):
        return [*forms, "whole"], []
    room = kind.room(plan, scene.decoder.weights)
    if isinstance(room, Rejected):
        return [*forms, "whole"], [f"no packed weights: {room.reason}"]
    return [*forms, *WHOLE], []


def _worthwhile(scene: Scene, ops: Step, forms: list[StepForm]) -> tuple[list[StepForm], str]:
    """Without a whole step that promises too little to be compiled unasked; and why."""
    if "whole" not in forms or scene.plan.step == "whole":
        return forms, ""
    kind, fused = kind_of(scene.plan.device), write_step(scene.decoder, scene.cache, scene.place)
    why = kind.reluctant(ops, fused, scene.plan, scene.fp)
    if not why:
        return forms, ""
    return [form for form in forms if form not in WHOLE], f"no {kind.name}: {why}; --step whole asks for one"


def _proven(
    scene: Scene, ledger: Ledger | None, ops: Step, form: StepForm, question: Question | None
) -> tuple[GraphStep | WholeStep, Passed]:
    """The step in this form, and its proof."""
    arm = question.arms.get(form) if question is not None else None
    digests = {arm.digest, arm.build} if arm is not None else set()
    if form == "graph":
        refuse_held(ledger, scene.fp, "the graph", digests)
        captured = GraphStep.of(ops)
        return captured, _refuse_other_logits(scene, ops, captured, "the graph")
    kind = kind_of(scene.plan.device)
    if form == "packed":
        kind.prepare(scene.plan, scene.decoder.weights, scene.fp)
    whole = kind.write(write_step(scene.decoder, scene.cache, scene.place), scene.fp, form)
    refuse_held(ledger, scene.fp, whole.candidate, {whole.build, *digests})
    with holding(ledger, scene.fp, whole):
        return whole, _refuse_other_logits(scene, ops, whole, whole.candidate)


def _called(scene: Scene, form: StepForm) -> str:
    return {"graph": "graph", "packed": "packed weights"}.get(form, kind_of(scene.plan.device).name)


def _refuse_other_logits(scene: Scene, ops: Step, other: GraphStep | WholeStep, name: str) -> Passed:
    """Raises ParityError, DeviceFault."""
    ops.run()
    ops.settle()
    expected = ops.logits.clone()
    other.logits.fill_(math.nan)  # a graph of the list writes where the list does
    other.run()
    other.settle()
    if torch.equal(expected, other.logits):
        return Passed(cases=1, worst=0.0, worst_case="the logits of the step op by op, bit for bit")
    error, bound = judged(other.logits, expected, scene.reference(), scene.plan.dtype)
    if not error <= bound:
        raise ParityError(
            f"the logits of {name} are not those of the step op by op",
            why=f"{error:.3g} from the reference, {bound:.3g} allowed",
            todo="use --step ops, and report this",
        )
    return Passed(cases=1, worst=error / bound, worst_case="logits against a pass in higher precision")
