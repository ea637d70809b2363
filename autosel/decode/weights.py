"""A model's weights for the step: query, key and value projections stacked, all in one arena.

They are read from a checkpoint folder of safetensors or a GGUF file, or drawn at random with the preset's shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from autosel import devices
from autosel.decode.cache import cache_bytes
from autosel.decode.compressed import PACKED, open_compressed
from autosel.decode.float8 import E4M3, open_float8
from autosel.decode.gguf import ReadCodes, open_gguf
from autosel.decode.gptq import CODES, open_packed_rows
from autosel.decode.pages import PageArena, padded
from autosel.decode.passes import activation_bytes
from autosel.decode.run import Listener, Plan, Silent
from autosel.decode.safetensors import Tensors, open_folder
from autosel.errors import BadConfig, UsageError
from autosel.models import is_gguf
from autosel.models.quantised import Scheme, scheme_of
from autosel.models.shape import ModelShape
from autosel.ops.contract import DTYPE
from autosel.ops.eager_stored import held_bytes
from autosel.ops.weight import PART, Matrix, Weight, empty, parts_of, quantise
from autosel.values import DTYPE_BYTES, DTypeName

# Prefixes of the decoder's tensors: plain checkpoints; Gemma 3 with its vision tower, newer and older spelling; a base
# model saved without its head.
PREFIXES = (("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model."), ("", ""))
# Buffers of some checkpoints that config.json determines.
DERIVED = ("rotary_emb.inv_freq",)
BLOCK = (1 << 24) - 3  # elements drawn; prime, so that no row or tile of a real shape repeats another
OTHERS_BYTES = 1 << 30  # for the interpreter with torch, a step's activations, probes
PROBE_BYTES = 1 << 30  # buffer that probes a GPU's read rate, for the lifetime of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's tensors. Shapes use the letters of ModelShape; None if the family has no such norm."""

    attn_norm: Tensor  # [d]
    qkv: Matrix  # [(Hq + 2 Hkv) D, d], queries first
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Matrix  # [d, Hq D]
    attn_post_norm: Tensor | None  # [d]
    mlp_norm: Tensor  # [d]
    gate: Matrix  # [I, d]
    up: Matrix  # [I, d]
    down: Matrix  # [d, I]
    mlp_post_norm: Tensor | None  # [d]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights by name: `embedding`, `0.qkv` and the other fields of `Layer` after each layer's number, `norm`,
    `head`.

    A model that ties its head to the embedding has no `head`.
    """

    shape: ModelShape
    dtype: DTypeName
    named: Mapping[str, Matrix]  # a matrix in its format, a norm in the dtype
    source: str  # "random", the folder or the GGUF file
    note: str = ""  # how they were stored, if other than in an ordinary dtype

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of activations, norms, keys and values."""
        return DTYPE[self.dtype]

    @property
    def embedding(self) -> Matrix:
        """Return [V, d]."""
        found: Matrix = self["embedding"]
        return found

    @property
    def layers(self) -> tuple[Layer, ...]:
        names = [f.name for f in fields(Layer)]
        parts = ({n: self.named.get(f"{i}.{n}") for n in names} for i in range(self.shape.layers))
        return tuple(Layer(**part) for part in parts)  # type: ignore[arg-type]

    @property
    def norm(self) -> Tensor:
        """Return [d]."""
        found: Tensor = self["norm"]
        return found

    @property
    def head_name(self) -> str:
        return "embedding" if self.shape.tied else "head"

    @property
    def head(self) -> Matrix:
        """Return [V, d]."""
        found: Matrix = self[self.head_name]
        return found

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Yield name and matrix of every product of a step."""
        for name, matrix in self.named.items():
            if len(matrix.shape) == 2 and name != "embedding":
                yield name, matrix
        if self.shape.tied:
            yield "embedding", self.embedding

    def look_up(self, name: str, tokens: Tensor) -> Tensor:
        """Return rows of a table [V, d] in the dtype of activations."""
        return looked_up(self[name], tokens, self.torch_dtype)

    @property
    def bytes(self) -> int:
        return self.shape.weight_bytes(self.dtype)

    @property
    def memory(self) -> Tensor:
        """Return the bytes of all weights, in the order of `named`."""
        storage = self["norm"].untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def looked_up(table: Matrix, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a table; rows in a format are rounded to the dtype once."""
    if isinstance(table, Tensor):
        return table[tokens]
    rows: Tensor = table.rows(tokens.flatten()).dequantised(dtype).unflatten(0, tokens.shape)
    return rows


def load_weights(plan: Plan, listener: Listener | None = None) -> Weights:
    """Load the weights that a plan names. Raises BadConfig (unreadable, or another model's), UsageError (no memory)."""
    shape, device = plan.shape, torch.device(plan.device)
    tensors = refuse_unloadable(plan)
    arena = PageArena(arena_bytes(shape, plan.dtype), device)
    with torch.inference_mode():
        if tensors is None:
            return _built(shape, plan.dtype, arena, _Drawn(plan), plan.weights, listener)
        made = _built(shape, plan.dtype, arena, tensors, plan.weights, listener)
    return replace(made, note=tensors.tensors.note(shape, plan.dtype))


def weights_of(source: TensorSource, shape: ModelShape, dtype: DTypeName) -> Weights:
    """Copy the weights of another source, in the shape's formats, into one arena. Raises BadConfig, UsageError."""
    tensors = _Checkpoint(source, shape, shape.layers)
    arena = PageArena(arena_bytes(shape, dtype), torch.device(devices.HOST))
    return _built(shape, dtype, arena, tensors, str(source.place))


def refuse_other_tensors(source: TensorSource, shape: ModelShape) -> None:
    """Raise BadConfig for tensors of another model than the shape's."""
    _Checkpoint(source, shape, shape.layers)


def refuse_unloadable(plan: Plan) -> _Checkpoint | None:
    """Return the source of the weights, None for random ones. Only headers are read. Raises as `load_weights`."""
    found = None if plan.weights == "random" else _opened(Path(plan.weights))
    tensors = None if found is None else _Checkpoint(found, plan.shape, plan.full_layers)
    refuse_without_memory(plan)
    return tensors


def _opened(path: Path) -> TensorSource:
    if is_gguf(path):
        return open_gguf(path)
    found = open_folder(path)
    scheme = scheme_of(path)
    _refuse_contradiction(found, scheme)
    if scheme is None:
        return found
    if scheme.floats:
        return open_float8(found, scheme)
    return open_compressed(found, scheme) if scheme.method == "compressed-tensors" else open_packed_rows(found, scheme)


def _refuse_contradiction(tensors: Tensors, scheme: Scheme | None) -> None:
    """Raise BadConfig for codes that config.json does not describe, and for a description without codes."""
    if scheme is not None and scheme.floats:
        _refuse_other_floats(tensors, scheme)
        return
    expected = "" if scheme is None else PACKED if scheme.method == "compressed-tensors" else CODES
    packed = next((name for name in tensors.entries if name.endswith((PACKED, CODES))), "")
    if (scheme is None and not packed) or (scheme is not None and packed.endswith(expected)):
        return
    told = f"has {packed}" if packed else f"has no tensor that ends in {expected}"
    raise BadConfig(
        f"{tensors.place} {told}, and its config.json {scheme.method if scheme else 'no'} quantization_config",
        todo="fetch the checkpoint again: its config.json belongs to other weights",
    )


def _refuse_other_floats(tensors: Tensors, scheme: Scheme) -> None:
    packed = next((name for name in tensors.entries if name.endswith((PACKED, CODES))), "")
    if packed or not any(entry.dtype == E4M3 for entry in tensors.entries.values()):
        raise BadConfig(
            f"{tensors.place} has {packed or f'no tensor in {E4M3}'}, and its config.json floats of 8 bits",
            why=f"quantization_config of {scheme.method}",
            todo="fetch the checkpoint again: its config.json belongs to other weights",
        )


# --- memory ----------------------------------------------------------------------------------------------------------


def arena_bytes(shape: ModelShape, dtype: DTypeName) -> int:
    return sum(padded(part) for name, size in _tensors(shape) for part in _part_bytes(shape, dtype, name, size))


def _part_bytes(shape: ModelShape, dtype: DTypeName, name: str, size: tuple[int, ...]) -> list[int]:
    """Return the bytes of each tensor of a weight: the codes and the scales of a matrix in a format."""
    if len(size) < 2:
        return [math.prod(size) * DTYPE_BYTES[dtype]]
    n, k = size
    return [part.nbytes(dtype, n, k) for part in shape.format_of(name).parts]


def memory_need(plan: Plan) -> int:
    """Return the bytes that the run will need.

    They are weights, both arms' caches, temporary memory of the prompt or the reference, logits, and the rest of the
    process.
    """
    arms = 1 if plan.cache == "contiguous" else 2  # both arms read one contiguous cache
    logits = 4 * plan.batch * plan.shape.V * DTYPE_BYTES["fp32"]
    held = arena_bytes(plan.shape, plan.dtype) + arms * cache_bytes(plan)
    held += baseline_bytes(plan) if plan.baseline else 0
    probe = 0 if devices.named(plan.device).on_host else PROBE_BYTES
    return held + logits + max(activation_bytes(plan), reference_bytes(plan)) + probe + OTHERS_BYTES


def baseline_bytes(plan: Plan) -> int:
    """Return the memory of the baseline's own form of weights in groups (ops/eager_stored.py)."""
    shape = plan.shape
    found = [(n, size) for n, size in _tensors(shape) if len(size) == 2 and (shape.tied or n != "embedding")]
    return sum(held_bytes(shape.format_of(name), plan.dtype, *size) for name, size in found)


def reference_bytes(plan: Plan) -> int:
    """Return the temporary memory of the reference pass, which widens a part of a weight at a time.

    It also widens one layer's keys and values, twice: the old ones, and those with the new ones.

    On a GPU no kernel of PyTorch's accepts grouped heads this wide: its composition of matrix products copies keys and
    values for every query head, and makes a scaled copy of the keys.
    """
    s, wide = plan.shape, 2 * DTYPE_BYTES["fp32"] if plan.dtype == "fp32" else DTYPE_BYTES["fp32"]
    heads = 4 * s.Hkv if devices.named(plan.device).on_host else max(4 * s.Hkv, 2 * s.Hkv + 3 * s.Hq)
    return wide * max(PART, heads * plan.batch * plan.longest * s.D)


def refuse_without_memory(plan: Plan) -> None:
    """Raise UsageError, with the sums, if the plan needs more memory than is free."""
    need, free = memory_need(plan), devices.named(plan.device).free_bytes()
    if need <= free:
        return
    weights, cache = arena_bytes(plan.shape, plan.dtype), cache_bytes(plan)
    raise UsageError(
        f"this run needs {need / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free",
        why=f"weights {weights / 2**30:.1f}, KV cache {cache / 2**30:.1f} GiB for {plan.batch} x {plan.longest} tokens",
        todo="use fewer --layers, a shorter --seq, a smaller --batch or a smaller model",
    )


# --- building --------------------------------------------------------------------------------------------------------


def _tensors(s: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, in the order in which a step reads them."""
    yield "embedding", (s.V, s.d)
    for i in range(s.layers):
        for name, size in _layer_tensors(s):
            yield f"{i}.{name}", size
    yield "norm", (s.d,)
    if not s.tied:
        yield "head", (s.V, s.d)


def _layer_tensors(s: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_norm", (s.d,)
    yield "qkv", (s.qkv_rows, s.d)
    if s.qk_norm:
        yield "q_norm", (s.D,)
        yield "k_norm", (s.D,)
    yield "o", (s.d, s.Hq * s.D)
    if s.sandwich:
        yield "attn_post_norm", (s.d,)
    yield "mlp_norm", (s.d,)
    yield "gate", (s.I, s.d)
    yield "up", (s.I, s.d)
    yield "down", (s.d, s.I)
    if s.sandwich:
        yield "mlp_post_norm", (s.d,)


def _built(
    shape: ModelShape,
    dtype: DTypeName,
    arena: PageArena,
    source: _Checkpoint | _Drawn,
    name: str,
    listener: Listener | None = None,
) -> Weights:
    """Fill the arena. Matrices that are rounded from the largest temporary ones come first, because the arena's other
    pages take no memory yet. Codes are read as they are stored, or rounded from a temporary matrix of the dtype.
    """
    listener, codes = listener or Silent(), source.codes(shape)

    def placed(part: str, size: tuple[int, ...]) -> Matrix:
        format_ = shape.format_of(part)
        if format_.plain or len(size) < 2:
            return arena.tensor(size, dtype)
        return empty(format_, *size, dtype=DTYPE[dtype], place=arena.bytes)

    def temporary(part: str) -> int:
        w = found[part]
        return 0 if isinstance(w, Tensor) or codes is not None else w.shape.numel()

    found = {part: placed(part, size) for part, size in _tensors(shape)}
    for i, part in enumerate(sorted(found, key=temporary, reverse=True)):
        listener.stage("weights", part, i, len(found))
        w = found[part]
        if isinstance(w, Tensor):
            source.read(part, w)
        elif codes is not None:
            codes(part, w)
        else:
            drawn = torch.empty(w.shape, dtype=DTYPE[dtype], device=arena.memory.device)
            source.read(part, drawn)
            _round(drawn, w)
    listener.stage("weights", name, len(found), len(found))
    return Weights(shape=shape, dtype=dtype, named=found, source=name)


class _Drawn:
    """Random weights: projections with variance 1/fan-in, so that activations stay of order one, and norms near one.

    One block of normals is drawn and repeated, for each tensor from another start: drawing billions takes minutes.
    """

    def __init__(self, plan: Plan) -> None:
        self.device, self.dtype, self.offset = torch.device(plan.device), DTYPE[plan.dtype], plan.model.norm_offset
        self.generator = torch.Generator(device=self.device).manual_seed(plan.seed)
        size = min(BLOCK, plan.model.V * plan.model.d)
        self.block = torch.randn(size, generator=self.generator, device=self.device).to(self.dtype)

    def read(self, name: str, out: Tensor, first: int = 0) -> None:
        """Draw a tensor, or some rows of it from `first` on."""
        if out.dim() == 1:
            drawn = torch.randn(out.shape, generator=self.generator, device=self.device)
            out.copy_(drawn * 0.1 + (1.0 - self.offset))
            return
        start, flat = (crc32(name.encode()) + first * out.shape[1]) % len(self.block), out.view(-1)
        while flat.numel():
            part = self.block[start : start + flat.numel()]
            torch.mul(part, out.shape[-1] ** -0.5, out=flat[: part.numel()])
            start, flat = 0, flat[part.numel() :]

    def codes(self, shape: ModelShape) -> ReadCodes:
        return self._codes

    def _codes(self, name: str, out: Weight) -> None:
        """Draw a matrix and round it to its format, some rows at a time."""
        first = 0
        for part in parts_of(out):
            assert isinstance(part, Weight)
            drawn = torch.empty(part.shape, dtype=self.dtype, device=self.device)
            self.read(name, drawn, first)
            _round(drawn, part)
            first += len(drawn)


def _round(w: Tensor, out: Weight) -> None:
    """Round a matrix to nearest in the format of `out`."""
    made = quantise(w, out.format)
    assert isinstance(made, Weight)
    for part, into in out.parts().items():
        into.copy_(made.parts()[part])


# --- Hugging Face's names --------------------------------------------------------------------------------------------


class TensorSource(Protocol):
    """Tensors by Hugging Face's names, of a checkpoint folder or a GGUF file."""

    @property
    def place(self) -> Path: ...

    @property
    def described_by(self) -> str:
        """Return what gives the sizes of the model, for messages."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`. Raises BadConfig for one of another shape."""

    def note(self, shape: ModelShape, dtype: str) -> str:
        """Describe the formats of weights that are not stored in an ordinary dtype, else ""."""

    def codes(self, shape: ModelShape) -> ReadCodes | None:
        """Return the function that reads a matrix as it is stored, if matrices are stored in the model's formats."""


class TensorEntry(Protocol):
    """Place of one tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class _Checkpoint:
    """Tensors by autosel's names. Raises BadConfig at once for missing tensors and for unused ones."""

    def __init__(self, tensors: TensorSource, shape: ModelShape, layers_there: int) -> None:
        self.tensors, self.shape = tensors, shape
        names = tensors.entries
        if not names:
            raise BadConfig(f"{tensors.place} has no tensors", todo="name a complete checkpoint")
        quantised = next(
            (n for n in names if n.endswith(("weight_scale", "weight_scale_inv", "qweight", "absmax"))), ""
        )
        if quantised:
            raise BadConfig(
                f"{tensors.place} is quantised: it has {quantised}",
                why="quantised weights are a different workload, not bf16 at lower cost",
                todo="name the unquantised checkpoint",
            )
        self.base, self.top = self._prefix()
        self._refuse_vocabulary()
        expected = {n for name, _ in _tensors(shape) for n in self._sources(name)}
        self._refuse_missing(expected)
        self._refuse_unknown(layers_there, expected)

    def read(self, name: str, out: Tensor) -> None:
        sources = self._sources(name)
        rows = self._rows(name, out)
        for source, part in zip(sources, out.split(rows) if len(sources) > 1 else [out], strict=True):
            self.tensors.read_into(source, part)

    def codes(self, shape: ModelShape) -> ReadCodes | None:
        """Return the function that reads a matrix of autosel's as it is stored; None if it must be rounded."""
        one = self.tensors.codes(shape)
        if one is None:
            return None

        def read(name: str, out: Weight) -> None:
            for source, part in zip(self._sources(name), out.split(self._rows(name, out)), strict=True):
                one(source, part)

        return read

    def _prefix(self) -> tuple[str, str]:
        for base, top in PREFIXES:
            if f"{base}embed_tokens.weight" in self.tensors.entries:
                return base, top
        some = ", ".join(sorted(self.tensors.entries)[:3])
        raise BadConfig(
            f"{self.tensors.place} has no embed_tokens.weight",
            why=f"it has {some}, ...",
            todo="name a checkpoint of a supported family, in Hugging Face's names",
        )

    def _sources(self, name: str) -> tuple[str, ...]:
        if name == "embedding":
            return (f"{self.base}embed_tokens.weight",)
        if name == "norm":
            return (f"{self.base}norm.weight",)
        if name == "head":
            return (f"{self.top}lm_head.weight",)
        layer, _, part = name.partition(".")
        return tuple(f"{self.base}layers.{layer}.{theirs}.weight" for theirs in self._theirs(part))

    def _theirs(self, part: str) -> tuple[str, ...]:
        # In Gemma, the norm after attention is the second half of a sandwich; elsewhere that name is the next block's
        # norm.
        before_mlp = "pre_feedforward_layernorm" if self.shape.sandwich else "post_attention_layernorm"
        return {
            "attn_norm": ("input_layernorm",),
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "q_norm": ("self_attn.q_norm",),
            "k_norm": ("self_attn.k_norm",),
            "o": ("self_attn.o_proj",),
            "attn_post_norm": ("post_attention_layernorm",),
            "mlp_norm": (before_mlp,),
            "gate": ("mlp.gate_proj",),
            "up": ("mlp.up_proj",),
            "down": ("mlp.down_proj",),
            "mlp_post_norm": ("post_feedforward_layernorm",),
        }[part]

    def _rows(self, name: str, out: Matrix) -> list[int]:
        s = self.shape
        return [s.Hq * s.D, s.Hkv * s.D, s.Hkv * s.D] if name.endswith("qkv") else [out.shape[0]]

    def _refuse_vocabulary(self) -> None:
        name = f"{self.base}embed_tokens.weight"
        found, source = self.tensors.entries[name].shape, self.tensors.described_by
        if len(found) == 2 and found[0] != self.shape.V:
            raise BadConfig(
                f"{self.tensors.place}: the vocabulary is {found[0]} by {name}, {self.shape.V} by {source}",
                why="token ids would select wrong rows",
                todo=f"fetch the checkpoint again: {source} belongs to other weights",
            )

    def _refuse_missing(self, expected: set[str]) -> None:
        missing = sorted(expected - set(self.tensors.entries))
        if missing:
            raise BadConfig(
                f"{self.tensors.place} lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}",
                why=f"{len(missing)} of the {len(expected)} tensors that {self.tensors.described_by} requires",
                todo=f"fetch the checkpoint again, or check that {self.tensors.described_by} belongs to it",
            )

    def _refuse_unknown(self, layers_there: int, expected: set[str]) -> None:
        """Refuse a tensor within the decoder that is not used (a bias, a norm): it makes another model."""
        used_layers = tuple(f"{self.base}layers.{i}." for i in range(self.shape.layers, layers_there))
        for name in self.tensors.entries:
            inside = name.startswith((f"{self.base}layers.", f"{self.base}embed", f"{self.base}norm"))
            if inside and name not in expected and not name.endswith(DERIVED) and not name.startswith(used_layers):
                raise BadConfig(
                    f"{self.tensors.place}: unexpected tensor {name}",
                    why=f"{self.shape.family} has no such tensor; without it the model would give other results",
                    todo=f"check that {self.tensors.described_by} belongs to this checkpoint",
                )


def refuse_other_tokens(tokens: Iterator[int] | list[int], shape: ModelShape) -> None:
    """Raise UsageError for token ids that the model has no row for."""
    for token in tokens:
        if not 0 <= token < shape.V:
            raise UsageError(
                f"token {token} is outside the vocabulary of {shape.V}",
                why=f"{shape.name} has no such token",
                todo="use the tokenizer that belongs to the checkpoint",
            )
