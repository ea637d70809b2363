"""Derive a certificate's figures from its model and the layers that ran.

bytes_per_step each weight once, the keys and values in reach, the embedding's rows; minus what packing saves
flops_per_step the projections, the output head and attention weights_bytes, kv_cache_bytes, shape, layers, and how
often a step calls what each layer needs

Before version 6 a certificate does not describe its model. For a model other than a preset, these figures then have
only limits, from the weights that its ops multiply. `underived` names the fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

from autosel.candidates import registry
from autosel.certify.certificate import SINCE, Certificate, OpFigures
from autosel.certify.derive import made_tokens, saved
from autosel.decode.run import EXECUTION, LARGEST, Plan
from autosel.errors import AutoselError
from autosel.models import PRESETS
from autosel.models.cost import bytes_per_step, cache_bytes, flops_per_step, products_per_token
from autosel.models.shape import SIZES, LayerType, ModelShape, Rope
from autosel.values import DTYPE_BYTES, Workload, from_json, to_json

PART = re.compile(r"\[\d+/\d+ layers\]$")  # as model_name writes it; a folder's own name may contain brackets too
ONCE_A_LAYER = {"rope": ("rope",), "kv_append": ("kv_append",), "attention": ("attn", "paged_attn")}
# The share of a call's bytes that packed weights may save, and how often it may move its activations (in, out, both).
MOST_SAVED, MOST_MOVED = 0.25, 3
MOST_LAYERS = 10_000  # limit for a model that only its certificate describes
UNDERIVED = ("bytes_per_step", "flops_per_step", "weights_bytes")


class Unlike(Exception):
    """A stated figure that does not follow from the model, with its field."""


def architecture(model: ModelShape) -> dict[str, Any]:
    """Return a certificate's description of a model, without the name."""
    return {name: value for name, value in to_json(model).items() if name != "name"}


def underived(made: Certificate) -> tuple[str, ...]:
    """Return the fields that cannot be derived: none, unless the architecture is unknown."""
    silent = made.architecture is None and made.version < SINCE["architecture"]
    return UNDERIVED if silent and _preset(made) is None else ()


def silence(made: Certificate) -> str:
    """Return a message if the certificate does not describe its model, so that figures cannot be derived; else ""."""
    fields = ", ".join(underived(made))
    return fields and f"model: version {made.version} does not describe {made.model!r:.60}: {fields}"


def plan_of(made: Certificate) -> Plan:
    """Return the plan of the run. Raises Unlike for values that no run can have."""
    o, model = made.options, _model(made)
    if made.layers.of != model.layers:
        raise Unlike(f"layers: {made.layers.of}; {model.name} has {model.layers}")
    if o.get("speculate") and (made.shape.batch > 1 or o.get("advance") is not True):
        raise Unlike("options: speculation with a batch or at a fixed context")
    if not 1 <= made.tokens_per_step <= 1 + LARGEST["speculate"]:
        raise Unlike(f"tokens_per_step: {made.tokens_per_step!r:.20}")
    page = o.get("page", 0)
    try:
        plan = Plan(
            model=model,
            layers=made.layers.run,
            weights=made.weights,
            dtype=made.dtype,  # type: ignore[arg-type]
            batch=made.shape.batch,
            seq=made.shape.seq,
            iters=_asked_iters(made),
            warmup=made.warmup,
            advance=bool(o.get("advance")),
            cache="paged" if page else "contiguous",
            page=page or 64,  # type: ignore[arg-type]
            prealloc=o.get("prealloc") is not False,
            speculate=o.get("speculate", 0),  # type: ignore[arg-type]
            step=o.get("step", "auto"),  # type: ignore[arg-type]  # older certificates: in their command alone
            layout=o.get("layout", "auto"),  # type: ignore[arg-type]
        )
    except AutoselError as error:
        raise Unlike(f"options: no run has these: {error.what}: {error.why}") from error
    if made.dtype not in DTYPE_BYTES or o.get("cache", plan.cache) != plan.cache:
        raise Unlike(f"dtype, options: {made.dtype!r:.20} in a {o.get('cache')!r:.20} cache of pages {page!r:.20}")
    return plan


def _asked_iters(made: Certificate) -> int:
    """Return the requested steps: a speculative run gives as many tokens in fewer steps."""
    return round(made.iters * made.tokens_per_step)


def _preset(made: Certificate) -> ModelShape | None:
    return PRESETS.get(PART.sub("", made.model).lower())


def _model(made: Certificate) -> ModelShape:
    preset = _preset(made)
    if made.architecture is None:
        if made.version >= SINCE["architecture"]:
            raise Unlike(f"architecture: none, in version {made.version}")
        return preset or _stated(made)
    try:
        model: ModelShape = from_json(ModelShape, {**made.architecture, "name": PART.sub("", made.model)})
    except (ValueError, AssertionError, ArithmeticError) as error:
        raise Unlike(f"architecture: not a possible model: {type(error).__name__} {error!s:.100}") from error
    _refuse_no_size(model)
    if preset is not None:
        other = [size for size in SIZES if getattr(model, size) != getattr(preset, size)]
        if other:
            raise Unlike(f"architecture: {other[0]} differs from {preset.name}'s")
    return model


def _refuse_no_size(model: ModelShape) -> None:
    sizes = [model.layers, model.d, model.Hq, model.Hkv, model.D, model.I, model.V, model.max_context]
    if min(sizes) < 1 or model.window < 0:
        raise Unlike("architecture: a size below 1")


def _stated(made: Certificate) -> ModelShape:
    """Return the simplest model with the sizes that the certificate states."""
    s, layers = made.shape, made.layers.of
    full: LayerType = "full"
    try:
        model = ModelShape(
            name=PART.sub("", made.model),
            family="llama",
            layers=layers,
            d=s.d,
            Hq=s.Hq,
            Hkv=s.Hkv,
            D=s.D,
            I=s.I,
            V=s.V,
            dtype=made.dtype,  # type: ignore[arg-type]
            activation="silu",
            rope=Rope(theta=1e4, rotary_dim=s.D),
            layer_types=(full,) * min(layers, MOST_LAYERS),
            rms_eps=1e-5,
            tied=True,
            max_context=1 << 24,
        )
    except (AssertionError, ArithmeticError) as error:
        raise Unlike(f"shape, layers: not a possible model: {type(error).__name__}") from error
    _refuse_no_size(model)
    return model


def trouble(made: Certificate) -> str:
    """Return the first field that does not follow from the model and its layers; "" if all do."""
    try:
        plan = plan_of(made)
        return _other_tokens(made, plan) or _other_sizes(made, plan) or _other_calls(made, plan)
    except Unlike as found:
        return str(found)


def _other_tokens(made: Certificate, plan: Plan) -> str:
    most = max(made.samples.kept, default=math.ceil(made.tokens_per_step))
    if not 1 <= made.tokens_per_step <= most <= 1 + plan.speculate:
        return f"tokens_per_step: {made.tokens_per_step!r:.20}, at most {most}, with {plan.speculate} drafted a step"
    v = made.verification
    if not 0 <= v.tokens_equal <= v.tokens_checked or not 0 <= (v.tokens_open or 0) <= v.tokens_checked:
        return f"verification: {v.tokens_equal} equal and {v.tokens_open} open of {v.tokens_checked} checked"
    if v.tokens_checked > made_tokens(made):
        return f"verification: {v.tokens_checked} tokens checked, more than the {made.iters} steps gave"
    return ""


def _context(made: Certificate, plan: Plan) -> int:
    """Return the tokens that the median step attends to."""
    return plan.seq + (made.iters - 1) // 2 if plan.advance else plan.seq


def _other_sizes(made: Certificate, plan: Plan) -> str:
    """Compare each figure with the closed form of the plan; with its limits, if the architecture is unknown.

    A step reads at least the model's matrices. In every known family it adds at most norms, an output head of its own
    and the keys and values of a whole context.
    """
    cut, known = plan.shape, not underived(made)
    context, page = _context(made, plan), plan.page if plan.cache == "paged" else 0
    richest = cut if known else replace(cut, tied=False, qk_norm=True, sandwich=True)
    most: dict[str, int] = {
        **{f"shape.{size}": getattr(plan.model, size) for size in ("d", "Hq", "Hkv", "D", "I", "V")},
        "shape.prompt": plan.seq - 1,
        "bytes_per_step": bytes_per_step(richest, plan.dtype, plan.batch, context) - saved(made),
        "flops_per_step": flops_per_step(richest, plan.batch, context),
        "weights_bytes": richest.weight_bytes(plan.dtype),
        "kv_cache_bytes": cache_bytes(cut, plan.dtype, rows=plan.batch, room=plan.longest, page=page),
    }
    least = dict(most)
    if not known:
        products = products_per_token(cut)
        matrices = DTYPE_BYTES[plan.dtype] * products
        least |= {"bytes_per_step": matrices - saved(made), "weights_bytes": matrices}
        least["flops_per_step"] = 2 * plan.batch * products
    for name, limit in most.items():
        stated = attrgetter(name)(made)
        if not least[name] <= stated <= limit:
            sizes = plan.model.name if known else "these sizes"
            given = limit if known else f"{least[name]} to {limit}"
            return f"{name}: {stated}; {made.layers.run} layers of {sizes} give {given}"
    return _other_form(made, plan)


def _other_form(made: Certificate, plan: Plan) -> str:
    """Check the form of the step against the requested one, and packed weights against the ops that read them."""
    packs = made.mode.startswith("team.") or any(o.candidate in _packers() for o in made.per_op.values())
    if made.options.get("saved_bytes") and (not packs or plan.layout == "plain"):
        why = "layout plain packs no weights" if plan.layout == "plain" else "only a team reads packed weights"
        why = why if made.mode.startswith("team.") else f"{why}, or an op with a layout, and none is in per_op"
        return f"options: saved_bytes in a step of mode {made.mode!r:.40}: {why}"
    execution = made.mode.partition(".")[0]
    if execution == "torch" and (claimed := [label for label, o in made.per_op.items() if _decided(o)]):
        return f"per_op: {claimed[0]!r:.60} is decided, but PyTorch alone runs the steps of mode {made.mode!r:.40}"
    if plan.step != "auto" and execution != EXECUTION[plan.step]:
        return f"options: step {plan.step!r} was requested, but mode is {made.mode!r:.40}"
    return ""


def _decided(o: OpFigures) -> bool:
    """Return True if a decision serves an op of PyTorch's step. Sampling is not part of it and does not count."""
    return o.op != "sample" and (o.decision_id is not None or o.candidate.partition(":")[0] != "torch")


@cache
def _packers() -> frozenset[str]:
    """Return the names of candidates that read weights in a layout."""
    return frozenset(c.name for c in registry.own_candidates() if c.layout is not None)


def _other_calls(made: Certificate, plan: Plan) -> str:
    """Check the calls of a step: each weight matrix is multiplied once, and each layer attends once, in any form."""
    try:
        ops = [(label, o, Workload.parse(o.workload)) for label, o in made.per_op.items()]
    except ValueError as error:
        return f"per_op: {error!s:.200}"
    for label, o, w in ops:
        if o.op != w.op or o.calls < 1:
            return f"per_op: {label!r:.60} runs {o.op!r:.20}, {o.calls} calls of {w.key:.60}"
        if trouble := _other_figures(label, o, w):
            return trouble
    if plan.speculate:  # ops that ran in fewer than half of the steps are not listed
        return ""
    found = sum(o.calls * _products(w) for _, o, w in ops)
    expected = plan.batch * products_per_token(plan.shape)
    if found != expected:
        return f"per_op: its calls multiply {found} weights; {made.layers.run} layers of {plan.model.name} {expected}"
    return _layer_calls([(o.calls, w) for _, o, w in ops], plan)


def _layer_calls(counted: Sequence[tuple[int, Workload]], plan: Plan) -> str:
    for what, names in ONCE_A_LAYER.items():
        found = sum(count for count, w in counted if w.op in names)
        whole = plan.advance and not plan.prealloc and what == "attention"  # several lengths, each counted separately
        if found != plan.layers_run and not whole:
            return f"per_op: {found} calls of {what} a step; {plan.layers_run} layers ran"
    if sum(count for count, w in counted if w.op == "lm_head") != 1:
        return "per_op: a step has one lm_head"
    return ""


def _products(w: Workload) -> int:
    """Return the multiply-adds with weights of one call."""
    if w.op == "linear":
        return w["M"] * w["N"] * w["K"]
    if w.op == "norm_qkv":
        return w["M"] * w["N"] * w["d"]
    if w.op == "gate_up":
        return 2 * w["M"] * w["I"] * w["d"]
    return w["M"] * w["V"] * w["d"] if w.op == "lm_head" else 0


def _other_figures(label: str, o: OpFigures, w: Workload) -> str:
    """Check a call that reads weights: its bytes and FLOPs are those of the weights, and little more."""
    products = _products(w)
    if not products or o.bytes is None or o.flops is None:
        return ""
    size, k = DTYPE_BYTES[w.dtype], w["K"] if w.op == "linear" else w["d"]
    weights = int(w.weight_format.bytes_per_weight(w.dtype, k) * products // w["M"])
    rows = size * w["M"] * sum(n for d, n in w.dims if d != "M")
    if not (1 - MOST_SAVED) * weights <= o.bytes <= weights + MOST_MOVED * rows + size * sum(n for _, n in w.dims):
        return f"per_op: {label!r:.60} bytes: {o.bytes} of a call whose weights are {weights}"
    if not 2 * products <= o.flops <= 3 * products:
        return f"per_op: {label!r:.60} flops: {o.flops} of a call of {products} multiply-adds"
    return ""
