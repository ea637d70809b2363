"""The forms to choose from for a scene's step, and the stored decision about it.

    question = ask(scene, ledger)      # Question: the forms that may be tried, each form's arm, the stored decision

A decision is valid for the model's dimensions, the batch, the bucket of context lengths and the threads, as long as
every form that could run, and the candidates of every op that they raced with, are unchanged.

The forms of a step are arms of the ledger: op by op, the baseline; PyTorch's own step, as before autosel; a graph of
the ops, on devices with graphs; and whole, by the device itself (persistent.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from autosel import devices
from autosel.candidates.arms import python_digest
from autosel.decode import graph
from autosel.decode.cache import Cache
from autosel.decode.model import Decoder
from autosel.decode.run import FORMS, Chain, Form, Offer, StepForm
from autosel.decode.scene import Scene
from autosel.decode.step import Place, Step, write_step
from autosel.decode.team import PACKED
from autosel.formats import PLAIN
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.models.shape import ModelShape
from autosel.values import (
    WHOLE_STEP,
    Accepted,
    Arm,
    Backend,
    Decision,
    DTypeName,
    PythonRecipe,
    Scalar,
    Workload,
    digest,
)

OPS = "ops:step"  # each op by its candidate, in the fastest chain
TORCH = "torch:step"  # PyTorch alone
GRAPH = "graph:step"
WRITER = PythonRecipe(target="autosel.decode.step:write_step")
CAPTURER = PythonRecipe(target="autosel.decode.graph:captured")
EAGER = PythonRecipe(target="autosel.decode.torch_step:TorchStep")
_FORMS: Mapping[str, StepForm] = {OPS: "ops", TORCH: "torch", GRAPH: "graph", PACKED: "packed"}
REST = timedelta(hours=1)  # an undecided step is not raced again for this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question which form runs the step, with the answer if there is one.

    `forms` may be tried besides op by op; `refused` says why the device excludes others. `arms` are the keys of the
    ledger: every form that could run, even if memory is short now. It is empty if the plan sets the form, if only one
    form is possible, or without a ledger.
    """

    forms: tuple[StepForm, ...]
    refused: Mapping[StepForm, str]
    workload: Workload
    mode: str
    arms: Mapping[StepForm, Arm]
    contested: Mapping[StepForm, Arm]  # arms that a race can decide now: without packed weights that do not fit
    known: Decision | None
    form: StepForm | None  # the form of the known decision


def form_of(candidate: str) -> StepForm:
    """Return the form of a step's candidate; the device's own kernel runs it whole."""
    return _FORMS.get(candidate, "whole")


def ask(scene: Scene, ledger: Ledger | None, *, forced: bool = False) -> Question:
    """Return the forms to choose from, and the decision about them, if there is one.

    `forced`: none, so that they race again. A form in quarantine stays out.
    """
    plan, hw_id = scene.plan, scene.fp.hw_id
    chains = chains_of(scene.decoder, scene.cache, scene.place) if plan.step == "auto" and plan.listed else {}
    pytorch = plan.cache == "contiguous" and _ours(chains.values())
    graphs = plan.step != "ops" and isinstance(graph.supports(plan), Accepted)
    offer, fused = Offer(), chains.get("fused") if ledger is not None else None
    if plan.step in ("auto", "whole"):
        offer = scene.kind.offer(plan, scene.decoder.weights, scene.fp, fused)
    able: tuple[StepForm, ...] = (*(("torch",) if pytorch else ()), *(("graph",) if graphs else ()), *offer.forms)
    plain = plan.layout == "plain" and "packed" in able
    out = {*offer.refused, *(("packed",) if plain else ()), *(() if plan.baseline else ("torch",))}
    forms = tuple(form for form in able if form not in out)
    w, mode = workload_of(plan.shape, plan.dtype, plan.batch, plan.seq), current_mode("team")
    asks = ledger is not None and plan.step == "auto" and plan.listed and not plain
    arms = arms_of(scene.fp.kind, able, chains) | dict(offer.arms) if asks else {}
    contested = {form: arm for form, arm in arms.items() if form in ("ops", *forms)}
    known = None
    if ledger is not None and len(arms) > 1 and not forced:
        known = _known(ledger, hw_id, w.bucket, mode, arms) or _known(ledger, hw_id, w.bucket, mode, contested)
        known = known or _fresh_doubt(ledger, hw_id, w.bucket, mode, contested)
    if known is not None and not plan.baseline and form_of(known.arm.candidate) == "torch":
        known = None  # PyTorch's step keeps its own forms of weights
    return Question(
        forms=forms,
        refused={} if plain else offer.refused,
        workload=w,
        mode=mode,
        arms=arms if len(arms) > 1 else {},
        contested=contested,
        known=known,
        form=form_of(known.arm.candidate) if known is not None else None,
    )


def _known(ledger: Ledger, hw_id: str, bucket: str, mode: str, arms: Mapping[StepForm, Arm]) -> Decision | None:
    return ledger.known(hw_id, bucket, mode, {arm.digest for arm in arms.values()})


def workload_of(shape: ModelShape, dtype: DTypeName, batch: int, context: int) -> Workload:
    """Return the workload of these layers' step; every dimension and trait that changes the computation is in it."""
    sizes = {"B": batch, "layers": shape.layers, "d": shape.d, "I": shape.I, "Hq": shape.Hq, "Hkv": shape.Hkv}
    traits: dict[str, Any] = {"activation": shape.activation}
    traits |= {"sliding": shape.sliding_layers, "window": shape.window} if shape.window else {}
    traits |= {name: True for name in ("qk_norm", "sandwich") if getattr(shape, name)}
    traits |= {"weight": shape.weight} if shape.weight != PLAIN else {}
    traits |= {"table": shape.table} if shape.table else {}
    traits |= {"others": digest(shape.others)[:12]} if shape.others else {}
    return Workload(
        op=WHOLE_STEP,
        dims=(*sizes.items(), ("D", shape.D), ("V", shape.V), ("L", context)),
        dtype=dtype,
        traits=tuple(sorted(traits.items())),
    )


def _fresh_doubt(ledger: Ledger, hw_id: str, bucket: str, mode: str, arms: Mapping[StepForm, Arm]) -> Decision | None:
    """Return a decision of the last REST that stayed undecided about these arms, so that not every run races again."""
    now = {arm.digest for arm in arms.values()}
    for d in ledger.serving_rows(hw_id, bucket, mode):
        undecided = d.verdict is not None and d.verdict.outcome == "undecided"
        fresh = datetime.now(UTC) - datetime.fromisoformat(d.created_at) < REST
        entrants = {a.digest for a, _ in ledger.evidence(d.id).parities} | {d.arm.digest, d.baseline.digest}
        if undecided and fresh and entrants <= now:
            return d
    return None


# --- the forms as arms -----------------------------------------------------------------------------------------------


def chains_of(decoder: Decoder, cache: Cache, place: Place) -> dict[Form, Step]:
    """Write the step op by op, once with each form of a half layer."""
    forms = [form for form in FORMS if form != "added" or not decoder.shape.sandwich]
    return {form: write_step(decoder, cache, place, Chain(attn=form, mlp=form)) for form in forms}


def _ours(steps: Iterable[Step]) -> bool:
    """Return True if one of autosel's decisions serves an op in any chain; else PyTorch runs every op anyway."""
    candidates = {getattr(call.function, "candidate", "") for step in steps for call in step.calls}
    return any(candidate.partition(":")[0] not in ("", "torch") for candidate in candidates)


def arms_of(kind: str, able: Sequence[StepForm], steps: Mapping[Form, Step]) -> dict[StepForm, Arm]:
    """Return the arms of the forms that Python runs, as they would be written now; the baseline first.

    `kind`: of the device; `steps` are its chains.
    """
    served = _served(list(steps.values()))
    backend = devices.KINDS[kind].native
    found: dict[StepForm, Arm] = {"ops": _python_arm(OPS, backend, WRITER, served)}
    if "torch" in able:
        found["torch"] = _python_arm(TORCH, "TORCH", EAGER, "")
    if "graph" in able:
        found["graph"] = _python_arm(GRAPH, backend, CAPTURER, served)
    return found


def _served(steps: Sequence[Step]) -> str:
    """Return a digest of the candidates of all ops in the chains: another decision makes another arm."""
    served = {}
    for call in (c for step in steps for c in step.calls if c.workload is not None):
        decision = getattr(call.function, "decision", None)
        candidate = getattr(call.function, "candidate", "")
        own = decision is not None and decision.arm.candidate == candidate
        served[call.workload.bucket] = decision.arm.digest if own else candidate  # type: ignore[union-attr]
    return digest(served)[:12]


def _python_arm(candidate: str, backend: Backend, recipe: PythonRecipe, served: str) -> Arm:
    settings: dict[str, Scalar] = {"served": served}
    made = digest({"source": python_digest(recipe), "knobs": settings})
    return Arm(candidate=candidate, backend=backend, recipe=recipe, knobs=settings, digest=made)
