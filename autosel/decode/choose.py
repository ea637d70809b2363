"""How steps are taken: made of which ops, and in which form. The story of choosing, as `pipeline.tune` is of tuning:

what the plan forces -> what the ledger decided -> prove each form that can run -> race -> record -> obey

chosen = choose(scene, ledger)        # Chosen: form, chain, ways, note
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autosel.decode.chain import LEAST_GAIN, choose_chain, step_medians
from autosel.decode.decision import Question, ask, decide
from autosel.decode.hold import holding
from autosel.decode.persistent import kind_of
from autosel.decode.prove import Proven, prove
from autosel.decode.run import FUSED, WHOLE, Chain, Chosen, StepForm, Way
from autosel.decode.scene import Scene
from autosel.errors import DeviceFault, LedgerError, UsageError
from autosel.ledger.store import Ledger
from autosel.values import Decision


def choose(scene: Scene, ledger: Ledger | None, *, decides: bool = True) -> Chosen:
    """Return how the scene's steps are taken: as the plan says, else as decided, else as a race of whole steps finds.

    The race is recorded if `decides` and the ledger can be written; else it is short, and holds for this run alone.
    Raises UsageError, BuildError, ParityError, DeviceFault if the form that the plan asks for cannot be had.
    """
    question = ask(scene, ledger)
    decided = question.form if question is not None else None
    scene.listener.stage("chain", "whole steps", 0, 1)
    chain, ways = choose_chain(scene) if scene.plan.listed and decided not in WHOLE else (FUSED, ())
    if question is not None and question.known is not None and decided not in WHOLE:
        return _obeyed(scene, question, question.known, Proven(), chain, ways)
    proven = prove(scene, ledger, chain, question)
    if not proven.proofs:
        return Chosen(chain=chain, ways=ways, note=proven.note)
    try:
        with holding(ledger, scene.fp, proven.steps.get("whole")):
            decision = _decision(scene, ledger, question, proven, chain, decides=decides)
            if question is None or decision is None:
                return _fastest(scene, proven, chain, ways)
            return _obeyed(scene, question, decision, proven, chain, ways)
    except DeviceFault as fault:
        if scene.plan.step == "whole":
            raise
        why = fault.why or fault.what
    except LedgerError as error:
        why = f"it could not be decided: {error.what}"
    return Chosen(chain=chain, ways=ways, note=_joined(proven.note, f"no {kind_of(scene.plan.device).name}: {why}"))


def again(scene: Scene, chosen: Chosen) -> Chosen:
    """Return what an earlier run on these weights chose; weights as they are where packed ones have no room now."""
    if chosen.form != "packed":
        return chosen
    try:
        kind_of(scene.plan.device).prepare(scene.plan, scene.decoder.weights, scene.fp)
    except UsageError as error:
        return replace(chosen, form="whole", note=_joined(chosen.note, f"no {error.what}: {error.why}"))
    return chosen


def _decision(
    scene: Scene, ledger: Ledger | None, question: Question | None, proven: Proven, chain: Chain, *, decides: bool
) -> Decision | None:
    """Return the decision between the proven forms, after a race if there was none yet; None where none can be had."""
    if ledger is None or question is None:
        return None
    if question.known is not None:
        return question.known if _served(question.form, proven) else None
    return decide(scene, ledger, question, chain, proven.proofs) if decides and ledger.writable else None


def _served(form: StepForm | None, proven: Proven) -> StepForm | None:
    """Return the form that a decision for `form` gives here: weights as they are where there is no room to pack them;
    None where it was not proven."""
    if form == "packed" and form not in proven.proofs:
        form = "whole"
    return form if form in proven.proofs else None


def _obeyed(
    scene: Scene, question: Question, decision: Decision, proven: Proven, chain: Chain, ways: Sequence[Way]
) -> Chosen:
    """Return what the decision says."""
    form, raced, why = question.told(decision, kind_of(scene.plan.device).name)
    taken = _served(form, proven) or form
    return _chosen(taken, chain, ways, raced, _joined(proven.note, why))


def _fastest(scene: Scene, proven: Proven, chain: Chain, ways: Sequence[Way]) -> Chosen:
    """Return what the plan forces, else the fastest form: each in turn has to gain enough on the best before it."""
    steps, asked = proven.steps, scene.plan.step
    ns = dict(zip(steps, step_medians(scene, list(steps.values())), strict=True))
    best: StepForm = "ops" if asked == "auto" else asked
    for form in {"whole": WHOLE, "graph": ()}.get(asked, tuple(steps)):
        best = form if form in steps and ns[best] >= LEAST_GAIN * ns[form] else best
    raced = [Way.of_step(form, ns[form] / 1000, taken=form == best) for form in steps]
    return _chosen(best, chain, ways, raced, proven.note)


def _chosen(form: StepForm, chain: Chain, ways: Sequence[Way], raced: Sequence[Way], note: str) -> Chosen:
    """Leave the race of chains out where the step is taken whole: it is made of the fused one."""
    if form in WHOLE:
        return Chosen(form=form, ways=tuple(raced), note=note)
    return Chosen(form=form, chain=chain, ways=(*ways, *raced), note=note)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
