"""The contract of an op, which test, bench, tune and certify all read.

An op is its signature, a float64 reference, inputs, an error bound by first-order propagation of the roundings that its
contract allows, bytes moved and FLOPs. Candidates run it through one calling convention:

    result = candidate(*arguments, *outputs)

`arguments` are the op's `args` in order (tensors, None for an absent optional tensor, int/float scalars). `outputs` are
the op's outputs in order, each a preallocated tensor, or all None: then the candidate allocates. It returns its single
output or the tuple of them. An `inout` argument (a KV cache) is written in place and is the result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from autosel.ops.compare import Match, Mismatch, compare
from autosel.ops.dtypes import DTYPE, DTYPE_NAME, TINY_NORMAL, TINY_SUBNORMAL, U32, UNIT
from autosel.values import DTypeName, Scalar, Workload

if TYPE_CHECKING:
    from autosel.ops.domains import Domain, Row
    from autosel.ops.draw import Draw

__all__ = [
    "DTYPE", "DTYPE_NAME", "TINY_NORMAL", "TINY_SUBNORMAL", "U32", "UNIT",
    "Arg", "Case", "Expected", "Inputs", "Judge", "Match", "Mismatch", "Op", "Role", "Rows", "TensorSpec", "Written",
    "edge_sample", "row_by_row",
]  # fmt: skip

Inputs = Mapping[str, Any]  # argument name -> Tensor | Weight | Cached | None | int | float

Role = Literal["streamed", "resident", "inout"]


class Judge(Protocol):
    """Judges results for the inputs it was made for. RMS error and bias are compared with those of `baseline`."""

    def __call__(self, got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch: ...


def row_by_row(judge: Callable[[int, int], Mismatch | float]) -> Judge:
    """Return a judge of a token for each row. `judge` returns a Mismatch, or the share of the bound that a row's token
    uses.
    """

    def judged(got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch:
        worst = 0.0
        for row, token in enumerate(got[0].tolist()):
            found = judge(row, token)
            if isinstance(found, Mismatch):
                evidence = {"row": row, **found.evidence}
                return Mismatch(check=found.check, reason=f"row {row}: {found.reason}", evidence=evidence)
            worst = max(worst, found)
        return Match(worst=worst)

    return judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """One argument of an op.

    `streamed` operands are read from memory in real use (weights, KV pages), so the race rotates over copies to keep
    them cold. `resident` ones (activations) are fresh and warm. `inout` ones are written. A `weight` is a tensor or a
    `Weight` (ops/weight.py), a `cache` a tensor or a `Cached` (ops/cached.py).
    """

    name: str
    kind: Literal["tensor", "optional", "weight", "cache", "int", "float"]
    role: Role = "resident"
    default: Scalar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: DTypeName | Literal["int64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hostile input: `make(seed)` builds the arguments; `workload` is their (small) workload.

    `covers` names the faults that only this case detects. `averages` is True if elements have independent errors, so
    that RMS error and bias can be compared with the baseline's; equal rows do not.
    """

    name: str
    workload: Workload
    make: Callable[[int], dict[str, Any]]
    covers: str = ""
    averages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A part of the inputs that is small enough to check in float64 during a race.

    `inputs` reproduce exactly the elements that `pick` takes from each full output.
    """

    inputs: dict[str, Any]
    pick: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Rows):
    """Memory that a call writes in place, with some neighbouring elements.

    `inputs` have copies from before the call, `pick` reads the operands afterwards, `restore` writes the copies back.
    """

    restore: Callable[[], None]


def edge_sample(n: int, count: int, seed: int) -> Tensor:
    """Return `count` distinct indices below n, sorted, always with the first and the last: edges fail first."""
    if n <= count:
        return torch.arange(n)
    picked = torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(seed))
    picked[0] = 0
    picked[-1] = n - 1
    distinct: Tensor = torch.sort(picked).values.unique_consecutive()
    return distinct


class Op(ABC):
    """Base class of ops: one subclass per op (autosel/ops/<op>.py), registered in `ops.OPS`."""

    name: ClassVar[str]
    args: ClassVar[tuple[Arg, ...]]
    output_names: ClassVar[tuple[str, ...]]
    dim_names: ClassVar[tuple[str, ...]]
    trait_defaults: ClassVar[Mapping[str, Scalar]] = {}
    domains: ClassVar[Mapping[str, Domain]]  # one for each dimension, trait and argument (domains.py)
    by_row: ClassVar[tuple[str, ...]] = ()  # operands of which each row decides the same row of the results, for `rows`

    # --- shape ------------------------------------------------------------------------------------------------------

    def workload(self, dtype: DTypeName, dims: Mapping[str, int], **traits: Scalar) -> Workload:
        """Return the canonical workload: every dimension in the op's order, without traits at their default."""
        missing = [d for d in self.dim_names if d not in dims]
        assert not missing and len(dims) == len(self.dim_names), f"{self.name} takes {self.dim_names}, got {dict(dims)}"
        unknown = set(traits) - set(self.trait_defaults)
        assert not unknown, f"{self.name} has no traits {unknown}"
        kept = tuple((n, traits[n]) for n in self.trait_defaults if n in traits and traits[n] != self.trait_defaults[n])
        return Workload(op=self.name, dims=tuple((d, dims[d]) for d in self.dim_names), dtype=dtype, traits=kept)

    @abstractmethod
    def workload_of(self, inputs: Inputs) -> Workload:
        """Return the workload of these arguments. Raises BadArguments that names the argument and the reason."""

    @abstractmethod
    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of each of `output_names` (an inout argument is also an output, by the same name)."""

    # --- inputs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        """Return arguments like a model's from a seed: the same ones for parity, race and test."""

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        """Return new resident operands for the same streamed ones (each pair of a race gets new ones); cheap."""
        fresh = self.inputs(self.shrink(w), seed)
        streamed = {a.name for a in self.args if a.role != "resident"}
        return {n: inputs[n] if n in streamed or not isinstance(v, Tensor) else v for n, v in fresh.items()}

    def shrink(self, w: Workload) -> Workload:
        """Return a workload with the same resident operands and the smallest streamed ones, for `refresh`."""
        return w

    @abstractmethod
    def cases(self, w: Workload) -> tuple[Case, ...]:
        """Return the hostile battery at w's traits and dtype; the operands of a case take at most about 2 MiB."""

    def small_inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        """Return inputs of a case made of domains, with no more memory than its sizes need."""
        return self.inputs(w, seed)

    def affordable(self, w: Workload) -> bool:
        """Return True if a case made of domains may have this size: its reference is computed in float64."""
        return self.bytes_moved(w) <= 2 << 20 and self.flops(w) <= 1 << 25

    def admits(self, row: Row) -> bool:
        """Return True if these levels of the op's domains have a defined result together. Open factors are missing."""
        return True

    def finish(self, inputs: dict[str, Any], draw: Draw) -> None:  # noqa: B027  (most ops have nothing to hide)
        """In a case made of domains, write junk where the contract says that it must not influence the result."""

    def used(self, inputs: Inputs, name: str) -> Tensor | None:
        """Return which entries of an index operand decide the result (bool): others may be anything. None: all may."""
        return None

    def steps(self, inputs: Inputs) -> Sequence[Inputs]:
        """Return what a server calls next, step by step, for the same sequences in the same memory."""
        return ()

    # --- reference and bound ----------------------------------------------------------------------------------------

    @abstractmethod
    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the outputs in float64 for the exact (quantised) inputs."""

    @abstractmethod
    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the largest allowed error of each element, float64: allowed roundings, propagated to first order."""

    def verify(
        self, inputs: Inputs, got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None
    ) -> Match | Mismatch:
        """Judge a result."""
        return self.judge(inputs)(got, baseline)

    def judge(self, inputs: Inputs) -> Judge:
        """Return the judge of results for these inputs, after computing once what only depends on them."""
        return Expected(self, inputs).judge

    def own_judge(self, inputs: Inputs) -> Judge | None:
        """Return the judge of results that no bound of elements can judge (ties, supports, copies), else None."""
        return None

    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """Return about `count` output rows to check in float64 at full size, without computing the others."""
        picked = edge_sample(w.dims[0][1], count, seed)
        part = {**inputs, **{n: inputs[n][picked] for n in self.by_row}}
        return Rows(inputs=part, pick=lambda outs: tuple(out[picked] for out in outs))

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        """Return the part that determines the first output's elements at `where`, int64 [n, dimensions], worst first.

        A costly op returns only the first of them. None means that `rows` can afford the whole op.
        """
        return None

    def written(self, w: Workload, inputs: Inputs) -> Written | None:
        """Return what this call will write in place; None for an op that only writes its outputs."""
        return None

    # --- cost -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        """Return the bytes that must cross the memory bus once: each operand read once, each output written once.

        If they depend on data (lengths of sequences, experts that tokens choose), `inputs` determine them; without
        `inputs`, they are those of `inputs(w, seed)`.
        """

    @abstractmethod
    def flops(self, w: Workload) -> int:
        """Return the floating-point operations; a multiply-add counts as two."""

    # --- naming -----------------------------------------------------------------------------------------------------

    def label(self, w: Workload) -> str:
        """Return a short name for tables: usually the op's; more specific, such as `linear o`, if needed."""
        return self.name

    def arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return the inputs in calling order."""
        return tuple(inputs[a.name] for a in self.args)

    def allocate(self, w: Workload, fill: float | None = None) -> tuple[Tensor | None, ...]:
        """Return new tensors for the pure outputs, in order (inout results are arguments and not included)."""
        inout = {a.name for a in self.args if a.role == "inout"}
        made = [
            torch.empty(s.shape, dtype=torch.int64 if s.dtype == "int64" else DTYPE[s.dtype])
            for s in self.outputs(w)
            if s.name not in inout
        ]
        if fill is not None:
            for tensor in made:
                tensor.fill_(fill if tensor.is_floating_point() else int(fill) if math.isfinite(fill) else -(2**62))
        return tuple(made)


class Expected:
    """Reference and bound of the current inputs, or without a bound `own`, the judge that the op has for them."""

    def __init__(self, op: Op, inputs: Inputs) -> None:
        self.own = op.own_judge(inputs)
        if self.own is None:
            self.reference = op.reference(inputs)
            self.bound = op.bound(inputs, self.reference)

    def judge(self, got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None) -> Match | Mismatch:
        """Judge a result as `Op.verify` does."""
        return self.own(got, baseline) if self.own else compare(got, self.reference, self.bound, baseline)
