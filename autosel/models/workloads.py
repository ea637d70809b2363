"""List the workloads of a decode step and of a prompt, by the ops' names, dimensions and traits (autosel/ops/).

A step can run as a chain of fused ops (norm_qkv, gate_up, projections that add the residual) or split into their parts;
the decoder uses the chain that is faster as a whole, so both are listed. A window of at least the context has no effect
and is left out, so that equal computations have one key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosel.errors import UnknownName, UsageError
from autosel.formats import CACHE_FORMATS, FORMER_OPS, PLAIN, WEIGHT_FORMATS, find_cache_format, find_weight_format
from autosel.models.passes import Pass, passes
from autosel.models.shape import Activation, ModelShape
from autosel.values import DTypeName, Scalar, Workload

Chain = Literal["fused", "split", "both"]

SHORTEST_CONTEXT = 128
CONTEXT_LIMIT = 1 << 24
BATCH_LIMIT = 1 << 16
PAGE = 16  # tokens per page: vLLM's and SGLang's default block size for these models on CUDA
PREFILL_LENGTHS = (128, 512, 2048)
ACTIVATION_CODE: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # gate_up's `activation`

STEP_OPS = (
    "attn", "norm_qkv", "rope", "kv_append", "linear", "add_rmsnorm", "gate_up", "swiglu", "geglu", "rmsnorm",
    "lm_head", "sample",
)  # fmt: skip
ASKED_OPS = ("paged_attn", "prefill_attn")  # not part of autosel's decoder step, so listed only when named
WEIGHT_OPS, CACHE_OPS = ("linear", "norm_qkv", "gate_up", "lm_head"), ("attn",)  # that have formats
PROMPT_OPS = (*(op for op in STEP_OPS if op not in ("lm_head", "sample")), "prefill_attn")
ALIASES = ("gemv", "gemm")  # linear at M = 1, and above
NAMES = (*STEP_OPS, *ASKED_OPS, *ALIASES, *FORMER_OPS)  # of ops that can be asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Name a workload for tables, by its op and its role in the model (`linear qkv`), with the number of times that one
    decode step runs it in the chains that contain it.

    Attention is listed at several lengths, of which a step runs one. Workloads of a prompt only have 0 runs per step.
    """

    workload: Workload
    label: str
    calls_per_step: int
    chain: Chain = "both"


def workloads(
    model: ModelShape,
    *,
    batch: int = 1,
    context: int = 8192,
    dtype: DTypeName | None = None,
    ops: Sequence[str] | None = None,
) -> tuple[Workload, ...]:
    """Return the workloads of `step` without their names."""
    return tuple(n.workload for n in step(model, batch=batch, context=context, dtype=dtype, ops=ops))


def labels(model: ModelShape, *, batch: int = 1, context: int = 8192, dtype: DTypeName | None = None) -> dict[str, str]:
    """Return workload key -> name in tables (`linear o`), for every workload of the model in every format."""
    found: dict[str, str] = {}
    for weight, cache in ((PLAIN, PLAIN), *((w, PLAIN) for w in WEIGHT_FORMATS), *((PLAIN, c) for c in CACHE_FORMATS)):
        asked = step(
            model, batch=batch, context=context, dtype=dtype, ops=STEP_OPS + ASKED_OPS, weight=weight, cache=cache
        )
        found = {n.workload.key: n.label for n in asked} | found
    return found


def step(
    model: ModelShape,
    *,
    batch: int = 1,
    context: int = 8192,
    dtype: DTypeName | None = None,
    ops: Sequence[str] | None = None,
    prompt: int = 0,
    weight: str = PLAIN,
    cache: str = PLAIN,
) -> tuple[Named, ...]:
    """Return the workloads of one decode step of `batch` sequences, with attention at every length bucket up to
    `context`.

    With `prompt`, add the workloads of a prompt of so many tokens per sequence. `ops` keeps only the named ops (gemv
    and gemm address linear at M = 1 and above; a name of FORMER_OPS addresses the format that the op became); ASKED_OPS
    are listed only when named. `weight` and `cache` name the formats of weights and of keys and values. No workload
    appears twice. Raises UsageError, UnknownName.
    """
    model = model if weight == PLAIN else replace(model, weight=weight, table="", others=())
    weight = model.weight
    find_weight_format(weight), find_cache_format(cache)
    _check("batch", batch, BATCH_LIMIT)
    _check("context", context, CONTEXT_LIMIT)
    dtype = dtype or model.dtype
    lister = _Lister(model, batch, context, dtype, weight, cache)
    parts: list[tuple[int, Sequence[str], Sequence[Named]]] = [(batch, STEP_OPS, (*lister.step(), *lister.asked()))]
    if prompt:
        parts += [(p.tokens, PROMPT_OPS, some) for p, some in _of_passes(model, prompt, batch, dtype, weight, cache)]
    _refuse_alias(ops, [rows for rows, _, _ in parts])
    found: dict[str, Named] = {}
    for rows, default, some in parts:
        wanted = _wanted(ops, rows, default)
        for named in some:
            if named.workload.op in wanted:
                found.setdefault(named.workload.key, named)
    for former in (FORMER_OPS[name] for name in ops or () if name in FORMER_OPS):
        lister = _Lister(model, batch, context, dtype, **{former.trait: former.format})
        found |= {n.workload.key: n for n in lister.step() if n.workload.op == former.op}
    return tuple(found.values())


def of_prompt(
    model: ModelShape, tokens: int, *, batch: int = 1, dtype: DTypeName | None = None
) -> tuple[Workload, ...]:
    """Return the workloads of a prompt's passes, without the output head. Raises UsageError."""
    _check("batch", batch, BATCH_LIMIT)
    taken = _of_passes(model, tokens, batch, dtype or model.dtype, model.weight)
    return tuple(dict.fromkeys(named.workload for _, some in taken for named in some))


def _of_passes(
    model: ModelShape, tokens: int, batch: int, dtype: DTypeName, weight: str = PLAIN, cache: str = PLAIN
) -> Iterator[tuple[Pass, tuple[Named, ...]]]:
    _check("prompt", tokens, CONTEXT_LIMIT)
    for part in passes(tokens, batch):
        lister = _Lister(model, part.tokens, part.start + part.positions, dtype, weight, cache)
        yield part, tuple(lister.prompt(part))


def context_lengths(context: int) -> tuple[int, ...]:
    """Return the top of every length bucket from 128 up to the context, and the context itself."""
    lengths = []
    length = SHORTEST_CONTEXT
    while length < context:
        lengths.append(length)
        length *= 2
    return (*lengths, context)


def _check(name: str, value: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise UsageError(f"{name} {value!r}", why=f"a whole number from 1 to {high} is expected")


def _wanted(ops: Sequence[str] | None, rows: int, default: Sequence[str]) -> frozenset[str]:
    """Return the ops to list if a projection has so many rows."""
    if ops is None:
        return frozenset(default)
    alias = "gemv" if rows == 1 else "gemm"
    for name in ops:
        if name not in NAMES:
            raise UnknownName("op", name, NAMES)
    return frozenset({"linear" if name == alias else name for name in ops} - {*ALIASES, *FORMER_OPS})


def _refuse_alias(ops: Sequence[str] | None, rows: Sequence[int]) -> None:
    """Refuse gemv if every projection has more rows, and gemm if every one has one."""
    for name in ALIASES:
        if ops and name in ops and all((m == 1) != (name == "gemv") for m in rows):
            one = name == "gemm"
            raise UsageError(
                f"--op {name} with batch {rows[0]}",
                why="gemv is linear at batch 1, gemm above",
                todo=f"use {'gemv' if one else 'gemm'}, or another --batch{' or --prompt' if one else ''}",
            )


class _Lister:
    """List one model's workloads at one batch, context and dtype, in the order in which a step runs them."""

    def __init__(
        self,
        model: ModelShape,
        batch: int,
        context: int,
        dtype: DTypeName,
        weight: str = PLAIN,
        cache: str = PLAIN,
    ) -> None:
        self.batch, self.context, self.dtype, self.cache = batch, context, dtype, cache
        self.model = model if weight == model.weight else replace(model, weight=weight, others=())

    def step(self) -> Iterator[Named]:
        m, layers, norm = self.model, self.model.layers, self._offset()
        hidden = {"M": self.batch, "d": m.d}
        # The first layer's norm in the split chain, the final one in the fused.
        yield self._named("rmsnorm", hidden, 1, "both", "rmsnorm", **norm)
        yield from self._stored("qkv", "norm_qkv", {**hidden, "N": m.qkv_rows}, 1, "fused", "norm_qkv", **norm)
        yield from self._linear("qkv", "qkv", m.qkv_rows, m.d, 1, "split")
        if m.qk_norm:
            for part, count in (("q", m.Hq), ("k", m.Hkv)):
                rows = {"M": self.batch * count, "d": m.D}
                yield self._named("rmsnorm", rows, layers, "both", f"rmsnorm {part}", **norm)
        heads = {"M": self.batch, "Hq": m.Hq, "Hkv": m.Hkv, "D": m.D, "R": m.rope.rotary_dim}
        style: dict[str, Scalar] = {"style": m.rope.style} if m.rope.style else {}
        yield self._named("rope", heads, layers, "both", "rope", **style)
        yield self._named("kv_append", {"B": self.batch, "Hkv": m.Hkv, "S": 1, "D": m.D}, layers, "both", "kv_append")
        yield from self._attention()
        yield from self._into_residual("o", m.Hq * m.D)
        sandwich: dict[str, Scalar] = {"sandwich": 1} if m.sandwich else {}
        chain: Chain = "both" if m.sandwich else "split"
        yield self._named("add_rmsnorm", hidden, 2 * layers, chain, "add_rmsnorm", **norm, **sandwich)
        yield from self._feed_forward(norm)
        yield from self._into_residual("down", m.I)
        head = _weight(m.format_of("embedding" if m.tied else "head").name)
        yield self._named("lm_head", {"M": self.batch, "V": m.V, "d": m.d}, 1, "both", "lm_head", **head)
        yield self._named("sample", {"B": self.batch, "V": m.V, "L": self.context}, 1, "both", "sample")

    def asked(self) -> Iterator[Named]:
        m = self.model
        for length, window, layers in self._lengths():
            dims = {"B": self.batch, "Hq": m.Hq, "Hkv": m.Hkv, "S": 1, "D": m.D, "L": length, "page": PAGE}
            label = "paged_attn window" if window else "paged_attn"
            yield self._named("paged_attn", dims, layers, "both", label, **_window(window))
        for s in sorted({min(s, self.context) for s in PREFILL_LENGTHS}):
            dims = {"B": self.batch, "Hq": m.Hq, "Hkv": m.Hkv, "S": s, "D": m.D}
            if m.full_layers or s <= m.window:
                yield self._named("prefill_attn", dims, 0, "both", "prefill_attn")
            if m.window and s > m.window:
                yield self._named("prefill_attn", dims, 0, "both", "prefill_attn window", **_window(m.window))

    def prompt(self, part: Pass) -> Iterator[Named]:
        """List one pass of a prompt. Prompts use only the fused chain; the output head belongs to the step.

        The first pass has no cache to attend to; `context` is the number of positions visible to the last position of
        this one.
        """
        for named in self.step():
            w = named.workload
            if w.op == "kv_append":
                yield _of_prompt(replace(named, workload=w.at(B=part.rows, S=part.positions)))
                yield from self._prompt_attention(part)
            elif named.chain != "split" and w.op not in ("attn", "lm_head", "sample"):
                yield _of_prompt(named)

    def _prompt_attention(self, part: Pass) -> Iterator[Named]:
        m, cut = self.model, bool(self.model.window) and self.context > self.model.window
        dims = {"B": part.rows, "Hq": m.Hq, "Hkv": m.Hkv, "S": part.positions, "D": m.D}
        op = "attn" if part.start else "prefill_attn"
        if part.start:
            dims["L"] = self.context
        if m.full_layers or not cut:
            yield self._named(op, dims, 0, "both", "prompt attn")
        if cut:
            yield self._named(op, dims, 0, "both", "prompt attn window", **_window(m.window))

    def _attention(self) -> Iterator[Named]:
        m = self.model
        # Sequences of one batch differ in length, so a batch includes its lengths.
        ragged: dict[str, Scalar] = {"ragged": True} if self.batch > 1 else {}
        for length, window, layers in self._lengths():
            dims = {"B": self.batch, "Hq": m.Hq, "Hkv": m.Hkv, "S": 1, "D": m.D, "L": length}
            label = "attn window" if window else "attn"
            yield self._named("attn", dims, layers, "both", label, **ragged, **_window(window))

    def _lengths(self) -> Iterator[tuple[int, int, int]]:
        """Return (context length, window or 0, number of layers) of every attention; a window only if it is shorter."""
        m = self.model
        for length in context_lengths(self.context):
            whole = m.full_layers + (m.sliding_layers if length <= m.window else 0)
            if whole:
                yield length, 0, whole
        for length in context_lengths(self.context):
            if m.window and length > m.window:
                yield length, m.window, m.sliding_layers

    def _into_residual(self, name: str, k: int) -> Iterator[Named]:
        """Return a projection back to the residual stream. It can add the residual unless a norm comes first."""
        m = self.model
        if m.sandwich:
            yield from self._linear(name, name, m.d, k, 1, "both")
            return
        yield from self._linear(name, name, m.d, k, 1, "split")
        yield from self._linear(name, f"{name}+res", m.d, k, 1, "fused", residual=True)

    def _feed_forward(self, norm: dict[str, Scalar]) -> Iterator[Named]:
        m = self.model
        act: dict[str, Scalar] = {"activation": code} if (code := ACTIVATION_CODE[m.activation]) else {}
        dims = {"M": self.batch, "d": m.d, "I": m.I}
        yield from self._stored("gate", "gate_up", dims, 1, "fused", "gate_up", **norm, **act)
        yield from self._linear("gate", "gate", m.I, m.d, 2, "split")
        pointwise = {"M": self.batch, "I": m.I}
        if m.activation == "silu":
            yield self._named("swiglu", pointwise, m.layers, "split", "swiglu")
        else:
            tanh: dict[str, Scalar] = {"tanh": 1} if m.activation == "gelu_tanh" else {}
            yield self._named("geglu", pointwise, m.layers, "split", "geglu", **tanh)

    def _offset(self) -> dict[str, Scalar]:
        return {"offset": self.model.norm_offset} if self.model.norm_offset else {}

    def _linear(
        self, matrix: str, name: str, n: int, k: int, calls: int, chain: Chain, **traits: Scalar
    ) -> Iterator[Named]:
        dims = {"M": self.batch, "N": n, "K": k}
        return self._stored(matrix, "linear", dims, calls, chain, f"linear {name}", **traits)

    def _stored(
        self, matrix: str, op: str, dims: dict[str, int], calls: int, chain: Chain, label: str, /, **traits: Scalar
    ) -> Iterator[Named]:
        """List a product for each format of the matrix; `calls` are a layer's."""
        for name, layers in self.model.layers_by_format(matrix).items():
            yield self._named(op, dims, calls * layers, chain, label, **traits, **_weight(name))

    def _named(self, op: str, dims: dict[str, int], calls: int, chain: Chain, label: str, /, **traits: Scalar) -> Named:
        if op in CACHE_OPS and self.cache != PLAIN:
            traits["cache"] = self.cache
        label = " ".join((label, *(str(traits[name]) for name in ("weight", "cache") if name in traits)))
        w = Workload(op=op, dims=tuple(dims.items()), dtype=self.dtype, traits=tuple(traits.items()))
        return Named(workload=w, label=label, calls_per_step=calls, chain=chain)


def _weight(name: str) -> dict[str, Scalar]:
    return {} if name == PLAIN else {"weight": name}


def _window(window: int) -> dict[str, Scalar]:
    return {"window": window} if window else {}


def _of_prompt(named: Named) -> Named:
    return replace(named, label=f"prompt {named.label}", calls_per_step=0)
