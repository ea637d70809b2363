"""Describe the model of a GGUF file by its metadata, and by the shape of its embedding.

llama.cpp's names and defaults, with three differences from config.json: Mistral's models have the architecture `llama`,
a head is tied if the file has no `output.weight`, and Llama 3.1's rope is a tensor of divisors, not a set of factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autosel.errors import BadConfig
from autosel.formats import PLAIN
from autosel.models.config import refuse_too_large
from autosel.models.fields import Fields
from autosel.models.gguf.cursor import MetadataArray
from autosel.models.gguf.file import GgufFile
from autosel.models.gguf.mix import dequantised, most_frequent, read_as
from autosel.models.presets import every_sixth_full
from autosel.models.shape import Family, LayerType, ModelShape, Rope, RopeKind

FAMILIES: Mapping[str, Family] = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3"}
EMBEDDING, HEAD, DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
ROPES: Mapping[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}  # of every Llama 3.1 to 3.3
DIVISOR_TOLERANCE = 1e-4  # relative; they are stored in fp32
GEMMA3_27B_LAYERS = 62  # the only Gemma 3 that scales attention by (d / Hq) ** -0.5
# Settings that would change the layers; none of the three architectures has one.
UNSUPPORTED = (
    "expert_count", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_scale",
    "embedding_scale", "attention.scale", "attention.clamp_kqv",
)  # fmt: skip


def gguf_shape(file: GgufFile) -> ModelShape:
    """Return the model of a GGUF file, computed in bf16, in the format of its matrices. Raises BadConfig."""
    _refuse_part(file)
    name = _architecture(file)
    fields = _fields(file, name)
    _refuse_unsupported(fields)
    shape = _shape(file, fields, FAMILIES[name])
    refuse_too_large(shape, file.path)
    weight, others = most_frequent(read_as(file, shape.layers))
    return replace(shape, weight=weight, stored=weight, others=others)


def gguf_note(file: GgufFile, shape: ModelShape, dtype: str) -> str:
    """Describe the file's formats, and what its weights are read as by a model of the file."""
    own = gguf_shape(file)
    as_stored = (shape.weight, shape.others) == (own.weight, own.others) and own.formats != (PLAIN,)
    if not as_stored:
        read = f"dequantised to {dtype} when loaded"
    elif dequantised(file, own.layers):
        read = f"read as they are, and in part dequantised to {dtype}"
    else:
        read = "read as they are"
    return f"weights: {file.formats()} in {file.path.name}, {read}"


def _refuse_part(file: GgufFile) -> None:
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise BadConfig(
            f"{file.path} is one of {parts} parts of a model",
            why="a model in several files is not supported",
            todo="join them with llama.cpp: llama-gguf-split --merge FIRST_PART OUTPUT",
        )
    version = file.metadata.get("general.quantization_version", 2)
    if version != 2:
        raise BadConfig(
            f"{file.path}: general.quantization_version = {version!r:.40}",
            why="the layout of blocks is known for version 2",
            todo="convert the model again with a current llama.cpp",
        )


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if isinstance(name, str) and name in FAMILIES:
        return name
    raise BadConfig(
        f"{file.path}: general.architecture = {name!r:.60} is not supported",
        why="its layers do not belong to a known family",
        todo=f"supported: {', '.join(FAMILIES)}",
    )


def _fields(file: GgufFile, architecture: str) -> Fields:
    """Return the fields of the architecture: `block_count` for `llama.block_count`."""
    start = f"{architecture}."
    data = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    return Fields(path=file.path, data=data, defaults={}, where=start, todo="convert the model again, or name another")


def _refuse_unsupported(fields: Fields) -> None:
    for name in UNSUPPORTED:
        if fields.data.get(name):
            fields.refuse(name, "no op takes it")
    if not fields.flag("attention.causal", default=True):
        fields.refuse("attention.causal", "a decoder attends to earlier positions only")


def _shape(file: GgufFile, fields: Fields, family: Family) -> ModelShape:
    d, layers, heads = (fields.size(n, 1 << 17) for n in ("embedding_length", "block_count", "attention.head_count"))
    kv_heads = fields.size("attention.head_count_kv", 1024, default=heads)
    if layers > 1024 or heads > 1024 or heads % kv_heads:
        fields.refuse("attention.head_count", f"{layers} layers and {kv_heads} key-value heads do not fit")
    head, gemma = _head(fields, d, heads), family == "gemma3"
    types = _layer_types(fields, family, layers)
    rope, local = _ropes(file, fields, head, local=gemma)
    return ModelShape(
        name=file.path.with_suffix("").name or "model",
        family=family,
        layers=layers,
        d=d,
        Hq=heads,
        Hkv=kv_heads,
        D=head,
        I=fields.size("feed_forward_length", 1 << 20),
        V=_vocabulary(file, fields, d),
        dtype="bf16",
        activation="gelu_tanh" if gemma else "silu",
        rope=rope,
        rope_local=local,
        layer_types=types,
        window=fields.size("attention.sliding_window", 1 << 30) if "sliding" in types else 0,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 0.1),
        tied=HEAD not in file.tensors,
        max_context=fields.size("context_length", 1 << 30),
        norm_offset=1.0 if gemma else 0.0,
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich=gemma,
        attn_scale=(d / heads if layers == GEMMA3_27B_LAYERS else head) ** -0.5 if gemma else 0.0,
        embedding_scale=d**0.5 if gemma else 1.0,
    )


def _head(fields: Fields, d: int, heads: int) -> int:
    """Return the head dimension, the same for queries, keys, values and rope."""
    if "attention.key_length" not in fields.data and d % heads:
        fields.refuse("attention.key_length", f"{heads} heads do not divide embedding_length = {d}")
    head = fields.size("attention.key_length", 1024, default=d // heads)
    if head % 2:
        fields.refuse("attention.key_length", f"rope turns pairs of components, and the head has {head}")
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.size(name, 1024, default=head) != head:
            fields.refuse(name, f"the head dimension {head} is expected")
    return head


def _vocabulary(file: GgufFile, fields: Fields, d: int) -> int:
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise BadConfig(f"{file.path} has no {EMBEDDING}", why="it holds no language model", todo="name another file")
    if len(embedding.shape) != 2 or embedding.shape[1] != d:
        fields.refuse("embedding_length", f"{EMBEDDING} is {list(embedding.shape)}")
    if fields.size("vocab_size", 1 << 22, default=embedding.shape[0]) != embedding.shape[0]:
        fields.refuse("vocab_size", f"{EMBEDDING} has {embedding.shape[0]} rows; token ids would select wrong ones")
    return embedding.shape[0]


def _layer_types(fields: Fields, family: Family, layers: int) -> tuple[LayerType, ...]:
    if family != "gemma3":
        if fields.data.get("attention.sliding_window"):
            fields.refuse("attention.sliding_window", "llama.cpp ignores it for this architecture")
        return tuple("full" for _ in range(layers))
    name = "attention.sliding_window_pattern"
    pattern = fields.data.get(name)
    if not isinstance(pattern, MetadataArray):
        return every_sixth_full(layers, fields.size(name, 1024, default=6))
    if pattern.count != layers or pattern.numbers is None:
        fields.refuse(name, f"an entry for each of {layers} layers is expected")
    return tuple("sliding" if slides else "full" for slides in pattern.numbers)


def _ropes(file: GgufFile, fields: Fields, head: int, *, local: bool) -> tuple[Rope, Rope | None]:
    """Return the rope of the full layers and, for Gemma, of the sliding ones."""
    told = fields.data.get("rope.scaling.type", "none")
    kind = ROPES.get(told) if isinstance(told, str) else None
    if kind is None:
        fields.refuse("rope.scaling.type", f"known: {', '.join(ROPES)}")
    plain = Rope(theta=fields.number("rope.freq_base", 1.0, 1e12, default=None if local else 1e4), rotary_dim=head)
    if DIVISORS in file.tensors:
        return _divided(file, plain, kind), None
    factor = fields.number("rope.scaling.factor", 0.0, 1e6, default=1.0) if kind != "default" else 1.0
    context = fields.size("rope.scaling.original_context_length", 1 << 30, default=0, low=0)
    rope = replace(plain, kind=kind, factor=factor, original_context=context)
    theta = fields.number("rope.freq_base_swa", 1.0, 1e12, default=1e4)
    return rope, Rope(theta=theta, rotary_dim=head) if local else None


def _divided(file: GgufFile, plain: Rope, kind: RopeKind) -> Rope:
    """Return the rope of Llama 3.1 whose divisors a file holds. Raises BadConfig for others."""
    divisors = file.floats(DIVISORS)
    factor = max(divisors)
    rope = replace(plain, kind="llama3", factor=factor, **LLAMA3)  # type: ignore[arg-type]
    if kind == "default" and 1.0 <= factor <= 1e6 and len(divisors) == plain.rotary_dim // 2:
        pairs = zip(plain.inverse_frequencies(), rope.inverse_frequencies(), divisors, strict=True)
        if all(abs(d * scaled / f - 1) <= DIVISOR_TOLERANCE for f, scaled, d in pairs):
            return rope
    raise BadConfig(
        f"{file.path}: {DIVISORS} holds {len(divisors)} divisors of a rope, up to {factor:g}",
        why="only the divisors of Llama 3.1 to 3.3 are known",
        todo="name the checkpoint that the file was made from",
    )
