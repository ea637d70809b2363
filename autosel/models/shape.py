"""Describe a decoder-only model well enough to list its workloads, count its bytes and rebuild its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autosel.errors import BadConfig
from autosel.formats import PLAIN, WEIGHT_FORMATS, WeightFormat, find_weight_format
from autosel.values import DTYPE_BYTES, LATER, DTypeName

Family = Literal["llama", "mistral", "qwen3", "gemma3"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
LayerType = Literal["full", "sliding"]
RopeKind = Literal["default", "linear", "llama3", "dynamic", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Describe the rotary position embedding of the first `rotary_dim` components of each head.

    Style 0 pairs component i with i + rotary_dim/2 (Hugging Face checkpoints), style 1 with its neighbour (the original
    Llama weights). The factors belong to `kind`; `original_context` is the length before scaling.
    """

    theta: float
    rotary_dim: int
    style: Literal[0, 1] = 0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Return the `rotary_dim / 2` angles per position in radians. Raises BadConfig for a kind that also rescales
        attention."""
        plain = [self.theta ** (-2 * i / self.rotary_dim) for i in range(self.rotary_dim // 2)]
        if self.kind == "default":
            return tuple(plain)
        if self.kind == "linear":
            return tuple(f / self.factor for f in plain)
        if self.kind == "llama3":
            return tuple(self._llama3(f) for f in plain)
        raise BadConfig(
            f"rope type {self.kind!r} cannot be decoded yet",
            why="supported: default, linear and llama3; tuning works, because the shapes of all ropes are the same",
            todo="run the model at its original context: remove rope_scaling from a copy of config.json",
        )

    def _llama3(self, frequency: float) -> float:
        """Scale as Llama 3.1 (arXiv 2407.21783): stretch long waves by `factor`, keep short ones, blend those in
        between."""
        turns = self.original_context * frequency / (2 * math.pi)
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - keep) * frequency / self.factor + keep * frequency


MATRICES, TABLES = ("qkv", "o", "gate", "up", "down"), ("embedding", "head")  # of a layer; of the model
# Fields that determine how much a step reads and computes.
SIZES = ("layers", "d", "Hq", "Hkv", "D", "I", "V", "layer_types", "window", "tied", "qk_norm", "sandwich")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Describe one model. Capital letters are the dimensions of workloads.

    `layer_types[i]` says whether layer i attends to all positions or to the last `window`. `sandwich`: the block's
    output is normalised before it is added to the residual stream (Gemma). `qk_norm`: each query and key head is
    normalised before rope. `norm_offset` is added to every norm weight (Gemma 1, the others 0). `attn_scale` 0 means D
    ** -0.5. `embedding_scale` multiplies the input embedding (Gemma: sqrt(d)).
    """

    name: str
    family: Family
    layers: int
    d: int  # hidden size
    Hq: int
    Hkv: int
    D: int  # head dimension
    I: int  # intermediate size of the feed-forward part
    V: int  # vocabulary
    dtype: DTypeName
    activation: Activation
    rope: Rope
    layer_types: tuple[LayerType, ...]
    rms_eps: float
    tied: bool
    max_context: int
    window: int = 0
    rope_local: Rope | None = None  # of the sliding layers, if different (Gemma)
    norm_offset: float = 0.0
    qk_norm: bool = False
    sandwich: bool = False
    attn_scale: float = 0.0
    embedding_scale: float = 1.0
    weight: str = field(default=PLAIN, metadata=LATER)  # the format that its matrices are stored in
    table: str = field(default="", metadata=LATER)  # the format of embedding and output head, if another
    stored: str = field(default=PLAIN, metadata=LATER)  # the format that the checkpoint itself has for `weight`
    others: tuple[tuple[str, str], ...] = field(default=(), metadata=LATER)  # (matrix, format) of those in another one

    def __post_init__(self) -> None:
        assert self.Hq % self.Hkv == 0
        assert len(self.layer_types) == self.layers
        assert (self.window > 0) == ("sliding" in self.layer_types)

    def format_of(self, matrix: str) -> WeightFormat:
        """Return the format of a matrix: `embedding`, `head`, or `qkv`, `o`, `gate`, `up`, `down` after a layer's
        number and a dot."""
        table = self.table if matrix in TABLES else ""
        return find_weight_format(dict(self.others).get(matrix) or table or self.weight)

    def layers_by_format(self, matrix: str) -> Mapping[str, int]:
        """Return how many layers have a matrix (`qkv`) in each format, by the format's name, the first one first."""
        if not self.others:
            return {self.weight: self.layers}
        found = [dict(self.others).get(f"{i}.{matrix}", self.weight) for i in range(self.layers)]
        return {name: found.count(name) for name in dict.fromkeys(found)}

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the names of all formats of its matrices, in order."""
        used = {name for matrix in MATRICES for name in self.layers_by_format(matrix)}
        tables = {self.format_of(name).name for name in TABLES[: 1 if self.tied else 2]}
        return tuple(name for name in WEIGHT_FORMATS if name in used | tables)

    @property
    def quantised(self) -> str:
        """Return the first format of its matrices that is not plain; plain if there is none."""
        return next((name for name in self.formats if name != PLAIN), PLAIN)

    @property
    def full_layers(self) -> int:
        return self.layer_types.count("full")

    @property
    def sliding_layers(self) -> int:
        return self.layer_types.count("sliding")

    @property
    def qkv_rows(self) -> int:
        """Return the rows of the joined query, key and value projection."""
        return (self.Hq + 2 * self.Hkv) * self.D

    @property
    def parameters(self) -> int:
        """Return the number of weights, counting a tied embedding once, norms included."""
        return self.V * self.d * (1 if self.tied else 2) + self.layers * self._layer + self.d

    @property
    def _layer(self) -> int:
        projections = self.d * self.qkv_rows + self.Hq * self.D * self.d + 3 * self.d * self.I
        norms = self.d * (4 if self.sandwich else 2) + (2 * self.D if self.qk_norm else 0)
        return projections + norms

    def weight_bytes(self, dtype: DTypeName | None = None) -> int:
        """Return the bytes of all weights: matrices in their format, norms in the dtype."""
        embeddings = self._table_bytes("embedding", dtype) + (0 if self.tied else self._table_bytes("head", dtype))
        return embeddings + self._layers_bytes(dtype) + self.d * DTYPE_BYTES[dtype or self.dtype]

    def weight_bytes_per_step(self, dtype: DTypeName | None = None) -> int:
        """Return the weight bytes that one decode step reads: every layer and the output head; the single row of the
        input embedding is left out. The sum is b * [sum_l(d*D*(2Hq + 2Hkv) + 3*d*I) + V*d], with the norms."""
        norm = self.d * DTYPE_BYTES[dtype or self.dtype]
        return self._layers_bytes(dtype) + norm + self._table_bytes("embedding" if self.tied else "head", dtype)

    def embedded_bytes(self, rows: int, dtype: DTypeName | None = None) -> int:
        """Return the bytes of so many rows of the embedding."""
        return self.format_of("embedding").nbytes(dtype or self.dtype, rows, self.d)

    def _table_bytes(self, name: str, dtype: DTypeName | None) -> int:
        return self.format_of(name).nbytes(dtype or self.dtype, self.V, self.d)

    def _layers_bytes(self, dtype: DTypeName | None) -> int:
        known, sizes = dtype or self.dtype, self._matrices
        matrices = sum(
            layers * find_weight_format(name).nbytes(known, *size)
            for matrix, size in sizes.items()
            for name, layers in self.layers_by_format(matrix).items()
        )
        return matrices + self.layers * (self._layer - sum(n * k for n, k in sizes.values())) * DTYPE_BYTES[known]

    @property
    def _matrices(self) -> Mapping[str, tuple[int, int]]:
        """Return (rows, columns) of each matrix of a layer."""
        up = (self.I, self.d)
        sizes = ((self.qkv_rows, self.d), (self.d, self.Hq * self.D), up, up, (self.d, self.I))
        return dict(zip(MATRICES, sizes, strict=True))

    def kv_bytes_per_token(self, dtype: DTypeName | None = None) -> int:
        """Return the cache bytes of one more token over all layers, as long as no window has filled up."""
        return self.layers * 2 * self.Hkv * self.D * DTYPE_BYTES[dtype or self.dtype]

    def kv_bytes_read(self, context: int, dtype: DTypeName | None = None) -> int:
        """Return the cache bytes that one sequence's step reads at `context` = L tokens: b * 2 Hkv D * sum_l min(L,
        window_l)."""
        tokens = self.full_layers * context + self.sliding_layers * min(context, self.window)
        return tokens * 2 * self.Hkv * self.D * DTYPE_BYTES[dtype or self.dtype]
