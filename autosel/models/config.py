"""Read a Hugging Face `config.json` as a ModelShape, strictly and without transformers.

Both spellings are accepted: `torch_dtype` and `dtype`; `rope_theta` with `rope_scaling`, and `rope_parameters`, flat or
by layer type. A field may be missing if the family's configuration class has a default for it, as in published
checkpoints; sizes may not. Each refusal names file, field, value, and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from autosel.errors import BadConfig
from autosel.formats import PLAIN
from autosel.models.fields import Fields, read_document, shown
from autosel.models.presets import every_sixth_full
from autosel.models.quantised import read_scheme
from autosel.models.shape import Activation, Family, LayerType, ModelShape, Rope, RopeKind
from autosel.values import DTypeName

PARAMETER_LIMIT = 10**13

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
# A config saved from a configuration object alone has no `architectures`.
FAMILY_OF_TYPE: Mapping[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
# Defaults of the family's configuration class in transformers (5.23).
PLAIN_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False}
DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    "llama": PLAIN_DEFAULTS,
    "mistral": PLAIN_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {
        **PLAIN_DEFAULTS,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "gemma3": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
}
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
DTYPES: Mapping[str, DTypeName] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
LAYER_TYPES: Mapping[str, LayerType] = {"full_attention": "full", "sliding_attention": "sliding"}


def read_config(path: Path) -> ModelShape:
    """Return the model that `path`, a config.json, describes. Raises BadConfig."""
    return shape_of(read_document(path), path)


def shape_of(data: dict[str, Any], path: Path) -> ModelShape:
    """Return the model that a configuration describes; `path` names it in messages. Raises BadConfig."""
    family = _family(path, data)
    nested = data.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise BadConfig(f"{path}: text_config is {shown(nested)}", why="it must be an object")
    fields = Fields(path=path, data={**data, **nested} if nested else data, defaults=DEFAULTS[family])
    _refuse_unsupported(fields, data)
    scheme = read_scheme(fields, fields.data.get("quantization_config") or data.get("quantization_config"))
    shape = _shape(fields, family, path)
    if scheme is None or scheme.format == PLAIN:
        return shape
    return replace(shape, weight=scheme.format, table=PLAIN, stored=scheme.format)


def _family(path: Path, data: Mapping[str, Any]) -> Family:
    """Find the family by `architectures`, else by `model_type`. Refuse anything except a dense decoder of a known
    family."""
    supported = f"supported: {', '.join(FAMILIES)}"
    names, kind = data.get("architectures"), data.get("model_type")
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise BadConfig(f"{path}: architectures is {shown(names)}", why="it must be a list of names", todo=supported)
    for name in names or ():
        if name in FAMILIES:
            return FAMILIES[name]
    if not names and isinstance(kind, str) and kind in FAMILY_OF_TYPE:
        return FAMILY_OF_TYPE[kind]
    if not names and kind is None:
        raise BadConfig(
            f"{path} names no architectures and no model_type",
            why="it is not a transformers checkpoint",
            todo=supported,
        )
    told = ", ".join(names) if names else f"model_type {kind!r}"
    experts = any(data.get(f) for f in EXPERT_FIELDS) or "moe" in told.lower() or "mixtral" in told.lower()
    raise BadConfig(
        f"{path}: {told} is not supported",
        why="mixture-of-experts layers have no op yet" if experts else "its layers do not belong to a known family",
        todo=supported,
    )


def _refuse_unsupported(fields: Fields, top: Mapping[str, Any]) -> None:
    """Refuse settings that would change the layers from the ones listed."""
    for name in EXPERT_FIELDS:
        if fields.data.get(name):
            fields.refuse(name, "mixture-of-experts layers have no op yet")
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if fields.flag(name, default=False):
            fields.refuse(name, "no published checkpoint of the supported families has it, and no op takes it")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.data.get(name) is not None:
            fields.refuse(name, "Gemma 3 has none; null is expected")


def _shape(fields: Fields, family: Family, path: Path) -> ModelShape:
    d, layers = fields.size("hidden_size", 1 << 17), fields.size("num_hidden_layers", 1024)
    heads = fields.size("num_attention_heads", 1024)
    kv_heads = fields.size("num_key_value_heads", 1024, default=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    head = fields.size("head_dim", 1024, default=0)
    if not head:
        if d % heads:
            fields.refuse("num_attention_heads", f"head_dim is missing, and it does not divide hidden_size = {d}")
        head = d // heads
    if head % 2:
        fields.refuse("head_dim", f"rope turns pairs of components, and the head has {head}")
    types = _layer_types(fields, family, layers)
    gemma = family == "gemma3"
    rope, local = _ropes(fields, family, head)
    shape = ModelShape(
        name=_name(path),
        family=family,
        layers=layers,
        d=d,
        Hq=heads,
        Hkv=kv_heads,
        D=head,
        I=fields.size("intermediate_size", 1 << 20),
        V=fields.size("vocab_size", 1 << 22),
        dtype=_dtype(fields),
        activation=fields.choice("hidden_activation" if gemma else "hidden_act", ACTIVATIONS),
        rope=rope,
        rope_local=local,
        layer_types=types,
        window=fields.size("sliding_window", 1 << 30) if "sliding" in types else 0,
        rms_eps=fields.number("rms_norm_eps", 0.0, 0.1),
        tied=fields.flag("tie_word_embeddings"),
        max_context=fields.size("max_position_embeddings", 1 << 30, default=131072 if gemma else 2048),
        norm_offset=1.0 if gemma else 0.0,
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich=gemma,
        attn_scale=fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5 if gemma else 0.0,
        embedding_scale=d**0.5 if gemma else 1.0,
    )
    refuse_too_large(shape, path)
    return shape


def refuse_too_large(shape: ModelShape, path: Path) -> None:
    """Raise BadConfig for sizes that no model has."""
    if shape.parameters > PARAMETER_LIMIT:
        raise BadConfig(
            f"{path} describes {shape.parameters:.2g} parameters",
            why=f"layers {shape.layers}, hidden {shape.d}, intermediate {shape.I}, vocabulary {shape.V}",
            todo="check these sizes",
        )


def _layer_types(fields: Fields, family: Family, layers: int) -> tuple[LayerType, ...]:
    listed = fields.data.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(t, str) and t in LAYER_TYPES for t in listed):
            fields.refuse("layer_types", f"a list of {' and '.join(LAYER_TYPES)} is expected")
        if len(listed) != layers:
            fields.refuse("layer_types", f"it has {len(listed)} entries for num_hidden_layers = {layers}", seen=False)
        return tuple(LAYER_TYPES[t] for t in listed)
    if family == "gemma3":
        old = "_sliding_window_pattern" if "_sliding_window_pattern" in fields.data else "sliding_window_pattern"
        return every_sixth_full(layers, fields.size(old, 1024, default=6))
    if family == "qwen3" and fields.flag("use_sliding_window", default=False):
        full = fields.size("max_window_layers", 1024, low=0)
        return tuple("full" if i < full else "sliding" for i in range(layers))
    # A null window means no window; Mistral's class assumes 4096 only if the field is missing.
    slides = family == "mistral" and fields.data.get("sliding_window", 4096) is not None
    one: tuple[LayerType, ...] = ("sliding",) if slides else ("full",)
    return one * layers


def _ropes(fields: Fields, family: Family, head: int) -> tuple[Rope, Rope | None]:
    """Return the rope of the full layers and, for Gemma, of the sliding ones."""
    new, old = fields.data.get("rope_parameters"), fields.data.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            fields.refuse(name, "an object or null is expected")
    if new is not None and any(kind in new for kind in LAYER_TYPES):
        for kind in LAYER_TYPES:
            if not isinstance(new.get(kind), dict):
                fields.refuse("rope_parameters", f"{kind} is missing or no object")
        full = _rope(fields.inside("rope_parameters.full_attention", new["full_attention"]), head)
        local = _rope(fields.inside("rope_parameters.sliding_attention", new["sliding_attention"]), head)
        return full, local if family == "gemma3" else None
    shared = {k: v for k, v in fields.data.items() if k in ("rope_theta", "partial_rotary_factor") and v is not None}
    full = _rope(fields.inside("rope_parameters" if new else "rope_scaling", {**shared, **(new or old or {})}), head)
    if family != "gemma3":
        return full, None
    return full, Rope(theta=fields.number("rope_local_base_freq", 1.0, 1e12), rotary_dim=full.rotary_dim)


def _rope(fields: Fields, head: int) -> Rope:
    kind = fields.data.get("rope_type", fields.data.get("type", "default"))
    known = get_args(RopeKind)
    if kind not in known:
        fields.refuse("rope_type" if "rope_type" in fields.data else "type", f"known: {', '.join(known)}")
    if kind == "llama3":
        for needed in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if needed not in fields.data:
                fields.refuse(needed, "rope type llama3 needs it", seen=False)
    low = fields.number("low_freq_factor", 0.0, 1e6, default=1.0)
    high = fields.number("high_freq_factor", 0.0, 1e6, default=4.0)
    if kind == "llama3" and high <= low:
        fields.refuse("high_freq_factor", f"it must exceed low_freq_factor = {low}")
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    if int(head * partial) < 2 or int(head * partial) % 2:
        fields.refuse("partial_rotary_factor", f"it rotates {head * partial:g} of {head} components; that must be even")
    return Rope(
        theta=fields.number("rope_theta", 1.0, 1e12),
        rotary_dim=int(head * partial),
        kind=kind,
        factor=fields.number("factor", 0.0, 1e6, default=1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=fields.size("original_max_position_embeddings", 1 << 30, default=0, low=0),
    )


def _dtype(fields: Fields) -> DTypeName:
    """Return `dtype`, or `torch_dtype` (its old name); bf16, the default of every supported family, if both are
    missing."""
    told = {n: fields.data[n] for n in ("dtype", "torch_dtype") if fields.data.get(n) is not None}
    if len({str(v).removeprefix("torch.") for v in told.values()}) > 1:
        fields.refuse("dtype", f"torch_dtype = {shown(told['torch_dtype'])} says another")
    for name, value in told.items():
        plain = value.removeprefix("torch.") if isinstance(value, str) else ""
        if plain not in DTYPES:
            fields.refuse(name, f"supported: {', '.join(DTYPES)}")
        return DTYPES[plain]
    return "bf16"


def _name(path: Path) -> str:
    """Return the checkpoint folder's name; in a hub cache (models--owner--name/snapshots/<hash>) the model's name."""
    folder = path.resolve().parent if path.name == "config.json" else path.with_suffix("")
    for parent in folder.parents:
        if parent.name.startswith("models--"):
            return parent.name.split("--")[-1]
    return folder.name or "model"
