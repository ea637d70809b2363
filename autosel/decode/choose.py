"""Choose the ops and the form of the steps. One function tells the whole story, as `pipeline.tune` does for tuning:

what the device offers -> stored decision -> prove the forms that may be tried -> race -> record -> apply

    chosen = choose(scene, ledger)        # Chosen: form, chain, ways, note
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosel.decode.chain import LEAST_GAIN, choose_chain, converts, step_medians
from autosel.decode.decision import decide
from autosel.decode.hold import holding
from autosel.decode.packed import pack
from autosel.decode.prove import Proven, prove
from autosel.decode.question import Question, ask, form_of
from autosel.decode.run import FUSED, WHOLE, Chain, Chosen, StepForm, Way
from autosel.decode.scene import Scene
from autosel.decode.torch_step import AS_PYTORCH
from autosel.decode.weights import reference_bytes
from autosel.errors import DeviceFault, LedgerError, UsageError
from autosel.ledger.store import Ledger
from autosel.values import Decision

TAKEN: Mapping[StepForm, str] = {
    "ops": "op by op",
    "torch": "by PyTorch alone, as before autosel",
    "graph": "as a graph of its ops",
    "packed": "by one thread team, from packed weights",
}


CONVERTS = "PyTorch converts the weights of undecided ops at each call: tune first"
UNCHAINED = (*WHOLE, "torch")  # forms that the race of chains does not affect


def choose(scene: Scene, ledger: Ledger | None, *, decides: bool = True, forced: bool = False) -> Chosen:
    """Return the form of the scene's steps: from the plan, else from a stored decision, else from a race of whole
    steps.

    The race is recorded if `decides` and the ledger can be written; else it is short, and applies to this run only.
    `forced`: race again, whatever is decided.
    Raises UsageError, BuildError, ParityError, DeviceFault if the form that the plan requires fails.
    """
    question = ask(scene, ledger, forced=forced)
    scene.listener.stage("chain", "whole steps", 0, 1)
    slow = converts(scene)
    chained = scene.plan.listed and question.form not in UNCHAINED and not slow
    chain, ways = choose_chain(scene) if chained else (FUSED, ())
    if question.known is not None and question.form not in WHOLE:
        return _obeyed(scene, question, question.known, Proven(), chain, ways)
    proven = prove(scene, ledger, chain, question, willing=slow)
    if slow and question.known is None and scene.plan.step != "graph":
        return _without_conversions(proven)
    if not proven.proofs:
        return Chosen(chain=chain, ways=ways, note=proven.note)
    try:
        with holding(ledger, scene.fp, proven.steps.get("whole")):
            decision = _decision(scene, ledger, question, proven, chain, decides=decides)
            if decision is None:
                return _fastest(scene, proven, chain, ways)
            return _obeyed(scene, question, decision, proven, chain, ways)
    except DeviceFault as fault:
        if scene.plan.step == "whole":
            raise
        why = fault.why or fault.what
    except LedgerError as error:
        why = f"the race was not recorded: {error.what}"
    return Chosen(chain=chain, ways=ways, note=_joined(proven.note, f"no {scene.kind.name}: {why}"))


def again(scene: Scene, chosen: Chosen) -> Chosen:
    """Return an earlier run's choice for these weights; with unpacked weights if packed ones do not fit now."""
    if chosen.form != "packed":
        return chosen
    try:
        pack(scene.decoder.weights, scene.fp, to_come_bytes=reference_bytes(scene.plan))
    except UsageError as error:
        return replace(chosen, form="whole", decision=None, note=_joined(chosen.note, f"no {error.what}: {error.why}"))
    return chosen


def _without_conversions(proven: Proven) -> Chosen:
    """Return the whole step if it was proven. A race with ops whose weights PyTorch converts would take minutes."""
    if "whole" in proven.proofs:
        return Chosen(form="whole", note=_joined(proven.note, "not raced: op by op, PyTorch would convert weights"))
    return Chosen(note=_joined(proven.note, CONVERTS))


def _decision(
    scene: Scene, ledger: Ledger | None, question: Question, proven: Proven, chain: Chain, *, decides: bool
) -> Decision | None:
    """Return the decision between the proven forms, after a race if there was none; None if it is impossible."""
    if ledger is None or not question.arms:
        return None
    if question.known is not None:
        return question.known if _served(question.form, proven) else None
    return decide(scene, ledger, question, chain, proven.proofs) if decides and ledger.writable else None


def _served(form: StepForm | None, proven: Proven) -> StepForm | None:
    """Return the proven form for a decision: unpacked weights if packed ones do not fit; None if none was proven."""
    if form == "packed" and form not in proven.proofs:
        form = "whole"
    return form if form in proven.proofs else None


def _obeyed(
    scene: Scene, question: Question, decision: Decision, proven: Proven, chain: Chain, ways: Sequence[Way]
) -> Chosen:
    """Return the decided form, with the times of its race."""
    form = form_of(decision.arm.candidate)
    timings = decision.verdict.timings if decision.verdict else {}
    timed = {f: timings[arm.candidate] for f, arm in question.arms.items() if arm.candidate in timings}
    raced = [Way.of_step(f, t.median_us, taken=f == form) for f, t in timed.items()]
    who = TAKEN.get(form, f"by one {scene.kind.name}")
    note = f"the step {who}, by decision {decision.id}: {decision.reason}"
    taken = _served(form, proven) or form
    chosen = _chosen(taken, chain, ways, raced if len(raced) > 1 else [], _joined(proven.note, note))
    return replace(chosen, decision=decision) if taken == form else chosen


def _fastest(scene: Scene, proven: Proven, chain: Chain, ways: Sequence[Way]) -> Chosen:
    """Return the form that the plan requires, else the fastest; each must gain enough over the best before it."""
    steps, asked = proven.steps, scene.plan.step
    ns = dict(zip(steps, step_medians(scene, list(steps.values())), strict=True))
    best: StepForm = "ops" if asked == "auto" else asked
    for form in {"whole": WHOLE, "graph": ()}.get(asked, tuple(steps)):
        best = form if form in steps and ns[best] >= LEAST_GAIN * ns[form] else best
    raced = [Way.of_step(form, ns[form] / 1000, taken=form == best) for form in steps]
    return _chosen(best, chain, ways, raced, proven.note)


def _chosen(form: StepForm, chain: Chain, ways: Sequence[Way], raced: Sequence[Way], note: str) -> Chosen:
    """Return the choice, without the race of chains for a whole step, which is always fused, or PyTorch's."""
    if form in UNCHAINED:
        return Chosen(form=form, chain=AS_PYTORCH if form == "torch" else FUSED, ways=tuple(raced), note=note)
    return Chosen(form=form, chain=chain, ways=(*ways, *raced), note=note)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
