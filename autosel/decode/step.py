"""Two ways to run the decoder's ops: at once, or as a list written beforehand.

A written step is plain values: `calls` with op, workload, callable and operands; the buffers are operands. Running it
means going through the list, which costs Python a microsecond or two per call and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from autosel import devices, dispatch, ops
from autosel.decode.cache import Cache
from autosel.decode.model import Batch, Decoder
from autosel.decode.run import FUSED, Chain
from autosel.decode.sample import Sampler, largest
from autosel.decode.weights import Weights, looked_up
from autosel.dispatch import Bound
from autosel.ops.contract import DTYPE, Op
from autosel.ops.weight import Matrix
from autosel.values import Decision, Workload, length_bucket

ATTENTION = ("attn", "paged_attn")
# The candidates that passed parity before a race that kept the baseline.
Raced = Callable[[Decision | None], Collection[str]]


# --- at once ---------------------------------------------------------------------------------------------------------


class Direct:
    """Run each op at its call; it allocates its result."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.best = {name: dispatch.best(name) for name in ops.OPS}

    def __call__(self, op: str, site: str, *operands: Any) -> Any:
        return self.best[op](*(self.weights[o] if isinstance(o, str) else o for o in operands))

    def embed(self, table: str, tokens: Tensor, scale: float) -> Tensor:
        x = self.weights.look_up(table, tokens)
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def packed(self, site: str, heads: Tensor) -> Tensor:
        return heads.reshape(-1, heads.shape[-1])


# --- written down ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Call:
    """One op of the step: `function(*arguments)`. The op's contract names operands, arguments and outputs: `call["x"]`.

    Attention's operands change with the length.
    """

    op: str  # or "glue": embedding, copies
    site: str
    workload: Workload | None
    function: Callable[..., Any]
    names: tuple[str, ...]
    arguments: list[Any]  # in the order of `names`
    weights: Mapping[str, str] = field(default_factory=dict)  # operand -> the weight's name
    layer: int = -1  # of attention

    def __getitem__(self, name: str) -> Any:
        return self.arguments[self.names.index(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        self.arguments[self.names.index(name)] = value


@dataclass(slots=True, kw_only=True)
class Place:
    """Position of each sequence: the tensors that change from step to step, and the largest length on the host."""

    tokens: Tensor  # int64 [B]: input of the next step
    positions: Tensor  # int64 [B]: positions of those tokens
    starts: Tensor  # the same, int32
    lengths: Tensor  # int32 [B]: tokens in the cache after the append
    longest: int

    @staticmethod
    def at(tokens: Tensor, counts: list[int]) -> Place:
        """Return the place of sequences that hold `counts` tokens and are fed `tokens` next."""
        held = torch.tensor(counts, dtype=torch.int64, device=tokens.device)
        return Place(
            tokens=tokens.clone(),
            positions=held,
            starts=held.int(),
            lengths=held.int() + 1,
            longest=max(counts) + 1,
        )

    def advance(self, count: int = 1) -> None:
        """Add `count` tokens to every sequence; a negative count removes them."""
        self.positions += count
        self.starts += count
        self.lengths += count
        self.longest += count


@dataclass(slots=True, kw_only=True)
class Step:
    """One decode step of B sequences, with the results `logits` [B, V] and `chosen`. `place` and the cache are its
    state.

    `flat` is what runs; `calls` describes each entry.
    """

    decoder: Decoder
    cache: Cache
    chain: Chain
    place: Place
    calls: list[Call]
    logits: Tensor
    chosen: Tensor | None  # int64 [B]: the next tokens, if the step chooses them
    length: int
    flat: list[tuple[Callable[..., Any], list[Any]]]

    def run(self) -> None:
        if self.place.longest != self.length:
            self._set_length(self.place.longest)
        for function, arguments in self.flat:
            function(*arguments)

    def run_to(self, end: int) -> None:
        """Run only the calls before `end`."""
        if self.place.longest != self.length:
            self._set_length(self.place.longest)
        for function, arguments in self.flat[:end]:
            function(*arguments)

    def run_chained(self) -> None:
        """Run on a GPU for a capture, with autosel's kernels as programmatic dependents.

        Each kernel loads its weights, which no kernel writes, while the previous one ends, and waits for its end before
        it reads anything else.
        """
        if self.place.longest != self.length:
            self._set_length(self.place.longest)
        for function, arguments in self.flat:
            (getattr(function, "chained", None) or function)(*arguments)

    def settle(self) -> None:
        """Wait until the enqueued work has ended: on a GPU, `run` only starts a step."""
        devices.of(self.logits).settle()

    def _set_length(self, length: int) -> None:
        """Bind attention again if the length is in another bucket or passes a window, which is another workload."""
        window, before = self.decoder.shape.window, self.length
        self.length = length
        same = length_bucket(before) == length_bucket(length) and (before <= window) == (length <= window)
        for call in self.calls:
            if call.op in ATTENTION:
                _lengthen(call, length, self.decoder.window(call.layer, length), bind=not same)
        if not same:
            self.flat = [(call.function, call.arguments) for call in self.calls]


@dataclass(slots=True, kw_only=True)
class Rewritten:
    """Another way to run a list of calls; `ops` is that list, which holds place, cache and buffers."""

    ops: Step

    @property
    def place(self) -> Place:
        return self.ops.place

    @property
    def cache(self) -> Cache:
        return self.ops.cache

    @property
    def logits(self) -> Tensor:
        return self.ops.logits

    @property
    def chosen(self) -> Tensor | None:
        return self.ops.chosen


class Runnable(Protocol):
    """A written step in any form."""

    @property
    def logits(self) -> Tensor: ...

    def run(self) -> None: ...

    def settle(self) -> None: ...


class StepPart(Protocol):
    """A part of a whole step. `calls` are the list's calls that it replaces, the slowest first."""

    @property
    def calls(self) -> tuple[Call, ...]: ...


class WholeStep(Protocol):
    """A step that the device runs by itself, from first task to last: by a thread team, or as one launch.

    `ops` is its list of calls, which holds its buffers. `kernels` names the single-op kernel with each op's arithmetic.
    `rest` runs after it, call by call.
    """

    ops: Step

    @property
    def candidate(self) -> str: ...

    @property
    def kernels(self) -> Mapping[str, str]: ...

    @property
    def build(self) -> str:
        """Return the digest of the compiled code."""

    @property
    def tasks(self) -> Sequence[StepPart]: ...

    @property
    def rest(self) -> Sequence[Call]: ...

    @property
    def place(self) -> Place: ...

    @property
    def cache(self) -> Cache: ...

    @property
    def logits(self) -> Tensor: ...

    @property
    def chosen(self) -> Tensor | None: ...

    def run(self) -> None:
        """Start the step. Raises DeviceFault."""

    def settle(self) -> None:
        """Wait until it has ended. Raises DeviceFault if it was stopped."""

    def task_ns(self) -> list[int]:
        """Run one step to its end; return when each task ended, in ns of one clock."""

    def shares_ns(self) -> dict[str, list[tuple[int, int]]]:
        """Run one step to its end; return by thread when its share of each task began and ended, in ns since the step
        began."""

    def idle(self) -> Callable[[], None]:
        """Return the same call with nothing to do, to measure the cost of the call."""


def fresh_logits(step: Runnable) -> Tensor:
    """Run the step and return its logits; NaN where it writes nothing. Raises DeviceFault."""
    step.logits.fill_(math.nan)
    step.run()
    step.settle()
    return step.logits


def write_step(
    decoder: Decoder, cache: Cache, place: Place, chain: Chain = FUSED, sampler: Sampler | None = None
) -> Step:
    """Write the step as a list, with every op bound by `best()` and every buffer allocated.

    With a sampler, the step ends with the choice of tokens; the caller draws its uniforms before each run.
    """
    rows = place.tokens.shape[0]
    recorder = Recorder(decoder.weights)
    batch = Batch(
        tokens=place.tokens,
        positions=place.positions,
        starts=place.starts,
        lengths=place.lengths if cache.paged or rows > 1 else None,
        max_len=place.longest,
        rows=rows,
    )
    logits = decoder.logits(recorder, decoder.hidden(recorder, batch, cache, chain))
    chosen = recorder.chosen(logits, sampler) if sampler else None
    calls = recorder.calls
    for layer, call in enumerate(c for c in calls if c.op in ATTENTION):
        call.layer = layer
    return Step(
        decoder=decoder,
        cache=cache,
        chain=chain,
        place=place,
        calls=calls,
        logits=logits,
        chosen=chosen,
        length=place.longest,
        flat=[(call.function, call.arguments) for call in calls],
    )


class Recorder:
    """Record calls instead of running them. Each site has one buffer per result, shared by all layers.

    Sharing is safe because a site's result is last read before the same site runs again; the residual stream alternates
    between the sites that write it.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.calls: list[Call] = []
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.bound: dict[str, Bound] = {}

    def __call__(self, op: str, site: str, *operands: Any) -> Any:
        contract = ops.find(op)
        inputs, weights = self._resolved(dict(zip((a.name for a in contract.args), operands, strict=True)))
        w = contract.workload_of(inputs)
        if w.key not in self.bound:
            self.bound[w.key] = dispatch.best(op, like=inputs)
        outputs = self._outputs(contract, w, site)
        for out in outputs.values():
            held = [t for t in inputs.values() if isinstance(t, Tensor) and _shares(t, out)]
            assert not held, f"{site}'s output buffer is also one of its arguments"
        self._write(op, site, w, self.bound[w.key], inputs | outputs, weights)
        made = tuple(outputs.values())
        return made[0] if len(made) == 1 else made

    def embed(self, table: str, tokens: Tensor, scale: float) -> Tensor:
        inputs, weights = self._resolved({"table": table, "tokens": tokens})
        rows, dtype = inputs["table"], self.weights.torch_dtype
        out = self._buffer("embed", 0, (tokens.shape[0], rows.shape[1]), dtype)
        self._write("glue", "embed", None, _embed, inputs | {"out": out}, weights)
        if scale != 1.0:
            factor = torch.tensor(scale, dtype=dtype, device=rows.device)
            self._write("glue", "embed", None, _scale, {"out": out, "scale": factor})
        return out

    def packed(self, site: str, heads: Tensor) -> Tensor:
        m, h, d = heads.shape
        if m == 1:
            return heads.view(h, d)
        out = self._buffer(f"packed {site}", 0, (m, h, d), heads.dtype)
        self._write("glue", f"packed {site}", None, _copy, {"out": out, "source": heads})
        return out.view(m * h, d)

    def chosen(self, logits: Tensor, sampler: Sampler) -> Tensor:
        if sampler.by_op:
            made: Tensor = self("sample", "token", logits, *sampler.arguments)
            return made
        out = self._buffer("token", 0, (logits.shape[0],), torch.int64)
        self._write("glue", "argmax", None, largest, {"logits": logits, "out": out})
        return out

    def _resolved(self, operands: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the operands with weights instead of names, and the names."""
        weights = {operand: name for operand, name in operands.items() if isinstance(name, str)}
        return {**operands, **{operand: self.weights[name] for operand, name in weights.items()}}, weights

    def _write(
        self,
        op: str,
        site: str,
        workload: Workload | None,
        function: Callable[..., Any],
        operands: Mapping[str, Any],
        weights: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        names, arguments = tuple(operands), list(operands.values())
        self.calls.append(
            Call(
                op=op,
                site=site,
                workload=workload,
                function=function,
                names=names,
                arguments=arguments,
                weights=weights,
            )
        )

    def _outputs(self, contract: Op, w: Workload, site: str) -> dict[str, Tensor]:
        inout = {a.name for a in contract.args if a.role == "inout"}
        specs = [s for s in contract.outputs(w) if s.name not in inout]
        dtypes = [torch.int64 if s.dtype == "int64" else DTYPE[s.dtype] for s in specs]
        return {s.name: self._buffer(site, n, s.shape, t) for n, (s, t) in enumerate(zip(specs, dtypes, strict=True))}

    def _buffer(self, site: str, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (site, index) not in self.buffers:
            self.buffers[site, index] = torch.empty(shape, dtype=dtype, device=self.weights.device)
        found = self.buffers[site, index]
        assert found.shape == shape and found.dtype == dtype
        return found


def _shares(operand: Tensor, buffer: Tensor) -> bool:
    return operand.untyped_storage().data_ptr() == buffer.data_ptr()


def _lengthen(call: Call, length: int, window: int, *, bind: bool) -> None:
    """Set attention's operands for another length."""
    call["max_len"], call["window"] = length, window
    if bind:
        contract = ops.find(call.op)
        inputs = {a.name: call[a.name] for a in contract.args}
        call.workload = contract.workload_of(inputs)
        call.function = dispatch.best(call.op, like=inputs)


def _embed(table: Matrix, tokens: Tensor, out: Tensor) -> None:
    if isinstance(table, Tensor):
        torch.index_select(table, 0, tokens, out=out)
    else:
        out.copy_(looked_up(table, tokens, out.dtype))


def _scale(x: Tensor, scale: Tensor) -> None:
    x.mul_(scale)


def _copy(out: Tensor, source: Tensor) -> None:
    out.copy_(source)
