"""Does the device take the whole step (persistent.py)? As with any candidate: parity first, then a race of whole steps.

Parity is against the op-by-op step that it would replace, from the same state: the same bits, or else as close to a
pass in higher precision as the judge of a measurement asks. The race needs a gain that noise does not explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch

from autosel.decode import graph
from autosel.decode.chain import LEAST_GAIN, step_medians
from autosel.decode.graph import GraphStep
from autosel.decode.hold import holding, refuse_held
from autosel.decode.model import Chain
from autosel.decode.persistent import kind_of, supports
from autosel.decode.run import WHOLE, Plan, StepForm, Way
from autosel.decode.scene import Scene, judged
from autosel.decode.step import Step, WholeStep, write_step
from autosel.errors import BuildError, DeviceFault, ParityError, UsageError
from autosel.ledger.store import Ledger
from autosel.values import Accepted, Fingerprint, Passed, Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The form that the step takes; `ways` are empty where there was no race, and `note` says why not."""

    form: StepForm = "ops"
    ways: tuple[Way, ...] = ()
    note: str = ""


Judge = Callable[[Chain, Mapping[StepForm, Passed]], Whole | None]


def choose_team(
    scene: Scene,
    chain: Chain,
    fp: Fingerprint,
    rng: Random,
    clock: Callable[[], int],
    judge: Judge | None = None,
    ledger: Ledger | None = None,
    known: StepForm | None = None,
) -> Whole:
    """Taken if the plan forces it; never if it forbids it; else as the judge decides (decode.standing); where there is
    none, or nothing it could decide, if it wins for this run alone: against op by op in the chosen chain, and on a GPU
    against a graph of that. The ledger holds what faulted. `known`: what a decision says; weights are then packed only
    for it.

    Raises what `Kind.write` and `run` raise, and ParityError, where it was forced; UsageError where a graph was.
    """
    plan = scene.plan
    team, note = _wanted(plan)
    replayed = plan.step != "ops" and isinstance(graph.supports(plan), Accepted)
    if not (team or replayed):
        return Whole(note=note)
    ops = write_step(scene.decoder, scene.cache, scene.place, chain)
    arms: dict[StepForm, Step | GraphStep | WholeStep] = {"ops": ops}
    proofs: dict[StepForm, Passed] = {}
    try:
        if replayed:
            captured = GraphStep.of(ops)
            proofs["graph"] = _refuse_other_logits(scene, ops, captured, "the graph")
            arms["graph"] = captured
    except (ParityError, UsageError) as error:
        if plan.step == "graph":
            raise
        note = f"no graph: {error.why}"
    forms, crowded = _whole_forms(scene, fp, known) if team else ((), "")
    note = "; ".join(filter(None, (note, crowded)))
    for form in forms:
        found = _team(scene, ops, fp, ledger, form)
        if isinstance(found, str):
            note = "; ".join(filter(None, (note, found)))
        else:
            arms[form], proofs[form] = found
    try:
        with holding(ledger, fp, arms.get("whole")):
            decided = judge(chain, proofs) if judge is not None and proofs and plan.step == "auto" else None
            if decided is not None:
                return replace(decided, note="; ".join(filter(None, (note, decided.note))))
            return _raced(arms, plan, note, rng, clock) if len(arms) > 1 else Whole(note=note)
    except DeviceFault as fault:
        if plan.step == "whole":
            raise
        return Whole(note=f"no {kind_of(plan.device).name}: {fault.why or fault.what}")


def _wanted(plan: Plan) -> tuple[bool, str]:
    """Is a step that the device takes whole to be tried? If it cannot be one, why."""
    if plan.step in ("ops", "graph"):
        return False, ""
    support = supports(plan)
    if isinstance(support, Rejected):
        return False, f"no {kind_of(plan.device).name}: {support.reason}"
    return True, ""


def _whole_forms(scene: Scene, fp: Fingerprint, known: StepForm | None) -> tuple[tuple[StepForm, ...], str]:
    """With packed weights too where the device reads such, no decision says otherwise, and there is room; if only that
    is missing, how much."""
    kind, plan = kind_of(scene.plan.device), scene.plan
    if known == "whole" or isinstance(kind.packs(plan, fp), Rejected):
        return WHOLE[:1], ""
    room = kind.room(plan, scene.decoder.weights)
    return (WHOLE[:1], f"no packed weights: {room.reason}") if isinstance(room, Rejected) else (WHOLE, "")


def _team(
    scene: Scene, ops: Step, fp: Fingerprint, ledger: Ledger | None, form: StepForm
) -> tuple[WholeStep, Passed] | str:
    """The step that the device takes whole, and its proof; or why there is none."""
    kind, packed, asked = kind_of(scene.plan.device), form == "packed", scene.plan.step == "whole"
    fused = write_step(scene.decoder, scene.cache, scene.place)
    why = "" if asked else kind.reluctant(ops, fused, scene.plan, fp)
    if why:
        return "" if packed else f"no {kind.name}: {why}; --persistent asks for one"
    try:
        if packed:
            kind.prepare(scene.plan, scene.decoder.weights, fp)
        team = kind.write(fused, fp, form)
        refuse_held(ledger, fp, team)
        with holding(ledger, fp, team):
            return team, _refuse_other_logits(scene, ops, team, team.candidate)
    except (BuildError, DeviceFault, ParityError, UsageError) as error:
        if asked and not packed:
            raise
        return f"no {'packed weights' if packed else kind.name}: {error.why or error.what}"


def _raced(
    arms: Mapping[StepForm, Step | GraphStep | WholeStep], plan: Plan, note: str, rng: Random, clock: Callable[[], int]
) -> Whole:
    """What was forced; else each form in turn has to gain enough on the best before it."""
    ns = dict(zip(arms, step_medians(list(arms.values()), rng, clock), strict=True))
    best: StepForm = "ops" if plan.step == "auto" else plan.step
    for form in {"whole": WHOLE, "graph": ()}.get(plan.step, tuple(arms)):
        best = form if form in arms and ns[best] >= LEAST_GAIN * ns[form] else best
    ways = tuple(Way.of_step(form, ns[form] / 1000, taken=form == best) for form in arms)
    return Whole(form=best, ways=ways, note=note)


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
            todo="use --no-graph or --no-persistent, and report this",
        )
    return Passed(cases=1, worst=error / bound, worst_case="logits against a pass in higher precision")
