"""A race's contests: the values that a race starts from and the shared operands that all arms use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autosel.candidates.control import Empty
from autosel.native.compile import compile_source
from autosel.ops import find
from autosel.ops.contract import DTYPE, Expected, Mismatch, Op, Rows
from autosel.ops.one_thread import spread
from autosel.ops.stored import leaves, received, sent, tensors
from autosel.race.plan import Margin, TimeClass
from autosel.values import Layout, NativeRecipe, Recipe, Scalar, Workload, from_json, to_json
from autosel.workers.arena import Arena, Ref

CHECKED_ROWS = 16
MAX_COPIES = 256
COLD_OVER_LLC = 3  # last-level caches of other data that pass before a copy is used again
KEPT_BYTES, MOST_ARMS = 32 << 20, 16  # of timed calls' results for each arm, and most arms
SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A candidate that passed parity, as a worker needs it."""

    candidate: str
    op: str
    recipe: Recipe
    digest: str
    knobs: Mapping[str, Scalar]
    writes_out: bool

    @property
    def loaded_name(self) -> str:
        """Return a name unique to the callable: one candidate may race with several knob settings in one process."""
        return f"{self.candidate}|{self.digest[:16]}|{sorted(self.knobs.items())}"


def empty_entrant(empty: Empty) -> Entrant:
    """Return a candidate that does nothing, compiled if necessary. Raises BuildError."""
    recipe = empty.loaded_as
    built = compile_source(recipe.source).digest if isinstance(recipe, NativeRecipe) else empty.name
    return Entrant(candidate=empty.name, op=empty.op, recipe=recipe, digest=built, knobs={}, writes_out=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One workload and its competitors; `margins` gives delta by time class."""

    workload: Workload
    baseline: Entrant
    incumbent: Entrant
    challengers: tuple[Entrant, ...]
    margins: Mapping[TimeClass, Margin]
    llc_bytes: int  # of the whole device: streamed operands must exceed it to be cold
    read_bytes_per_s: float = 0.0  # the highest rate ever read here: an arm far above it does not read; 0: not known

    @property
    def op(self) -> Op:
        return find(self.workload.op)

    @property
    def least_share(self) -> float:
        """Return the bytes of a weight that the smallest layout among the entrants reads."""
        return min((e.recipe.layout.share for e in self.entrants.values() if e.recipe.layout), default=1.0)

    @property
    def entrants(self) -> dict[str, Entrant]:
        return {e.candidate: e for e in (self.baseline, self.incumbent, *self.challengers)}


class SharedOperands:
    """A workload's operands in shared memory: drawn once, copied privately by each session's process."""

    def __init__(self, w: Workload, seed: int, llc_bytes: int, *, least_share: float = 1.0) -> None:
        """Create the operands. `least_share`: share of the streamed operands' bytes that every entrant reads."""
        self.workload, self.op = w, find(w.op)
        self.inputs = self.op.inputs(w, seed)
        sizes = [tensor.nbytes for tensor in leaves(self.inputs).values()]
        outputs = sum(prod(s.shape) * _dtype(s.dtype).itemsize for s in self.op.outputs(w))
        inout = any(a.role == "inout" for a in self.op.args)
        self.output_bytes = 0 if inout else outputs  # bytes that an arm writes in addition to its operands
        kept = MOST_ARMS * KEPT_BYTES if self.output_bytes else 0
        self.arena = Arena(
            sum(sizes) + 8 * outputs + kept + SLACK_BYTES + 4096 * (len(sizes) + 64),
            touched_bytes=sum(sizes) + 8 * outputs + kept // 4 + SLACK_BYTES,
        )
        self.refs: dict[str, Any] = {}
        for name, value in self.inputs.items():
            places = {leaf: self.arena.put(tensor) for leaf, tensor in leaves({name: value}).items()}
            self.refs[name] = to_json(sent(name, value, places))
            self.inputs[name] = received(self.refs[name], self._tensor)  # frees the drawn copy
        self._places: dict[str, tuple[Ref, ...]] = {}
        self._kept: dict[str, list[tuple[Ref, ...]]] = {}
        self._judge: tuple[int, Rows, Expected] | None = None  # of the current pair: by its seed, for all its arms
        self.streamed_bytes = self._bytes_of("streamed")
        # Of a cache with unequal lengths, or behind a window, a call reads only a part.
        self.read_bytes = min(self.streamed_bytes, self.op.bytes_moved(w))
        rotated = self.streamed_bytes + self._bytes_of("inout")
        passed, cold = int(rotated * least_share), COLD_OVER_LLC * llc_bytes
        self.copies = min(MAX_COPIES, 1 + cold // passed) if passed else 1
        # With too few copies, or where calls read only a part of them, the last-level cache may hold what is read.
        read = int((rotated - self.streamed_bytes + self.read_bytes) * least_share)
        self.is_cold = bool(self.streamed_bytes) and self.copies * read >= cold

    def _tensor(self, ref: Mapping[str, Any]) -> Tensor:
        return self.arena.tensor(from_json(Ref, ref))

    def _bytes_of(self, role: str) -> int:
        return sum(t.nbytes for a in self.op.args if a.role == role for t in tensors(self.inputs[a.name]))

    def least_saved(self, layout: Layout) -> int:
        """Return the most bytes that an arm with this layout can save of the weights that it prepares: by the smallest
        lossless layout of their format.
        """
        share = self.workload.weight_format.least_share(self.workload.dtype)
        weights = [t.nbytes for name in layout.weights for t in tensors(self.inputs[name])]
        return int(sum(weights) * (1 - share))

    def refresh(self, seed: int) -> dict[str, Any]:
        """Write new contents into the resident operands, in place; return their references.

        Index-like ones (positions, lengths, tables) stay: a cache written at ever new places would no longer be the one
        that the check knows.
        """
        fresh = self.op.refresh(self.workload, self.inputs, seed)
        changed: dict[str, Any] = {}
        for arg in self.op.args:
            value = fresh[arg.name]
            if arg.role == "resident" and isinstance(value, Tensor) and value.is_floating_point():
                self.inputs[arg.name].copy_(value)
                changed[arg.name] = self.refs[arg.name]
        return changed

    def places(self, arm: str) -> tuple[Ref, ...]:
        """Return the memory in which the worker puts this arm's outputs for checking."""
        if arm not in self._places:
            self._places[arm] = self._outputs()
        return self._places[arm]

    def _outputs(self) -> tuple[Ref, ...]:
        specs = self.op.outputs(self.workload)
        return tuple(self.arena.empty(s.shape, _dtype(s.dtype)) for s in specs)

    def kept(self, arm: str, count: int) -> list[tuple[Ref, ...]]:
        """Return the memory for the results of `count` timed calls; for fewer if there is no room."""
        if not self.output_bytes:
            return []
        places = self._kept.setdefault(arm, [])
        if len(self._kept) > MOST_ARMS:
            return []
        while len(places) < min(count, KEPT_BYTES // (self.output_bytes + 64 * len(self.op.output_names))):
            places.append(self._outputs())
        return places[:count]

    def tensors(self, places: Sequence[Ref]) -> tuple[Tensor, ...]:
        return tuple(self.arena.tensor(place) for place in places)

    def check(self, got: Sequence[Tensor], seed: int) -> Mismatch | None:
        """Judge 16 sampled rows of a result in float64, in this process and not in the candidate's."""
        with spread():
            rows, expected = self._expected(seed)
            found = expected.judge(rows.pick(got))
            return found if isinstance(found, Mismatch) else None

    def largest_bounds(self, seed: int) -> tuple[float, ...]:
        """Return the largest bound of each output's elements in 16 sampled rows; empty for an op with a separate
        judgement.
        """
        with spread():
            _, expected = self._expected(seed)
            if expected.own:
                return ()
            return tuple(float(b.max()) if b.numel() else 0.0 for b in expected.bound)

    def _expected(self, seed: int) -> tuple[Rows, Expected]:
        if self._judge is None or self._judge[0] != seed:
            rows = self.op.rows(self.workload, self.inputs, CHECKED_ROWS, seed)
            self._judge = seed, rows, Expected(self.op, rows.inputs)
        return self._judge[1:]

    def close(self) -> None:
        self.inputs = {}
        self.arena.close()


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name == "int64" else DTYPE[name]
