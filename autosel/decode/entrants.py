"""The forms of a step as arms of the ledger: op by op, the baseline; a graph of that, where the device has graphs; and
whole, by the device itself (persistent.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosel.candidates.arms import python_digest
from autosel.decode import graph
from autosel.decode.persistent import kind_of
from autosel.decode.run import FORMS, Chain, StepForm
from autosel.decode.scene import Scene
from autosel.decode.step import Step, write_step
from autosel.decode.team import PACKED
from autosel.values import Accepted, Arm, Backend, PythonRecipe, Scalar, digest

OPS = "ops:step"  # in the forms of the chain that was fastest, by whatever serves each op
GRAPH = "graph:step"
WRITER = PythonRecipe(target="autosel.decode.step:write_step")
CAPTURER = PythonRecipe(target="autosel.decode.graph:captured")
_FORMS: Mapping[str, StepForm] = {OPS: "ops", GRAPH: "graph", PACKED: "packed"}


def form_of(candidate: str) -> StepForm:
    """The form that a candidate for the step stands for: the device's own kernel takes it whole."""
    return _FORMS.get(candidate, "whole")


def arms_of(scene: Scene) -> dict[StepForm, Arm]:
    """Every form of the scene's step, as it would be written now; the baseline first."""
    plan, decoder, kind = scene.plan, scene.decoder, kind_of(scene.plan.device)
    forms = [form for form in FORMS if form != "added" or not decoder.shape.sandwich]
    steps = {form: write_step(decoder, scene.cache, scene.place, Chain(attn=form, mlp=form)) for form in forms}
    served = _served(list(steps.values()))
    backend: Backend = "CPP" if scene.fp.kind == "cpu" else "CUDA_EXT"
    found: dict[StepForm, Arm] = {"ops": _python_arm(OPS, backend, WRITER, served)}
    if isinstance(graph.supports(plan), Accepted):
        found["graph"] = _python_arm(GRAPH, backend, CAPTURER, served)
    whole = kind.arm(steps["fused"], scene.fp) if isinstance(kind.supports(plan), Accepted) else None
    if whole is not None:
        found["whole"] = whole
        packs = isinstance(kind.packs(plan, scene.fp), Accepted)
        packed = kind.arm(steps["fused"], scene.fp, "packed") if packs else None
        found |= {"packed": packed} if packed is not None else {}
    return found


def _served(steps: Sequence[Step]) -> str:
    """What serves an op in any of the chains: another decision about one of them makes another arm."""
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
