"""What an op promises: one place that test, bench, tune and certify all read.

An op is its signature, a float64 reference, inputs, an error bound by first-order propagation of the roundings its
contract allows, bytes moved and FLOPs. Candidates run it through one calling convention:

    result = candidate(*arguments, *outputs)

`arguments` are the op's `args` in order (tensors, None for an absent optional tensor, int/float scalars); `outputs` are
the op's outputs in order, each a preallocated tensor, or all None: then the candidate allocates. It returns its single
output or the tuple of them. An `inout` argument (a KV cache) is written in place and is the result.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from autosel.values import DTypeName, Scalar, Workload

if TYPE_CHECKING:
    from autosel.ops.domains import Domain, Row
    from autosel.ops.draw import Draw

DTYPE: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
DTYPE_NAME: Mapping[torch.dtype, DTypeName] = {v: k for k, v in DTYPE.items()}  # type: ignore[misc]

# Unit roundoff u = 2^-p of each dtype (half a unit in the last place of 1).
UNIT: Mapping[str, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp8_e4m3": 2.0**-4}
U32 = UNIT["fp32"]
# Smallest subnormal; and smallest normal, below which flush-to-zero is legal (vdpbf16ps and torch's linear flush).
TINY_SUBNORMAL: Mapping[str, float] = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149, "fp8_e4m3": 2.0**-9}
TINY_NORMAL: Mapping[str, float] = {"bf16": 2.0**-126, "fp16": 2.0**-14, "fp32": 2.0**-126, "fp8_e4m3": 2.0**-6}

Inputs = Mapping[str, Any]  # argument name -> Tensor | Weight | Cached | None | int | float

Role = Literal["streamed", "resident", "inout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """One argument. `streamed` operands are read from memory in real use (weights, KV pages): the race rotates them
    over copies so that they come cold; `resident` ones (activations) are fresh and warm; `inout` ones are written.
    A `weight` is a tensor or a `Weight` (ops/weight.py), a `cache` a tensor or a `Cached` (ops/cached.py)."""

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

    `covers` says in a few words what would slip through without it. `averages`: elements err independently, so that
    their RMS error and bias can be held against the baseline's; rows that are alike do not.
    """

    name: str
    workload: Workload
    make: Callable[[int], dict[str, Any]]
    covers: str = ""
    averages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A part of the inputs small enough to check in float64 while racing: `inputs` reproduce exactly the elements that
    `pick` takes from each full output."""

    inputs: dict[str, Any]
    pick: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Rows):
    """What a call writes in place, with some of what lies beside it: `inputs` hold copies of it as it was before the
    call, `pick` reads it from the operands afterwards, `restore` puts it back."""

    restore: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first check that a result fails, with the element at which it fails worst."""

    check: str
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The result is right; `worst` is the largest error divided by its bound."""

    worst: float


class Op(ABC):
    """Subclass once per op (autosel/ops/<op>.py) and register in `ops.OPS`."""

    name: ClassVar[str]
    args: ClassVar[tuple[Arg, ...]]
    output_names: ClassVar[tuple[str, ...]]
    dim_names: ClassVar[tuple[str, ...]]
    trait_defaults: ClassVar[Mapping[str, Scalar]] = {}
    domains: ClassVar[Mapping[str, Domain]]  # of each dimension, trait and argument (domains.py)

    # --- shape ------------------------------------------------------------------------------------------------------

    def workload(self, dtype: DTypeName, dims: Mapping[str, int], **traits: Scalar) -> Workload:
        """The canonical workload: every dimension, in the op's order; traits at their default left out."""
        missing = [d for d in self.dim_names if d not in dims]
        assert not missing and len(dims) == len(self.dim_names), f"{self.name} takes {self.dim_names}, got {dict(dims)}"
        unknown = set(traits) - set(self.trait_defaults)
        assert not unknown, f"{self.name} has no traits {unknown}"
        kept = tuple((n, traits[n]) for n in self.trait_defaults if n in traits and traits[n] != self.trait_defaults[n])
        return Workload(op=self.name, dims=tuple((d, dims[d]) for d in self.dim_names), dtype=dtype, traits=kept)

    @abstractmethod
    def workload_of(self, inputs: Inputs) -> Workload:
        """The workload these arguments are an instance of. Raises BadArguments, saying which argument and why."""

    @abstractmethod
    def outputs(self, w: Workload) -> tuple[TensorSpec, ...]:
        """Shape and dtype of each of `output_names` (an inout argument is an output too, by the same name)."""

    # --- inputs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        """Arguments as a model would produce them, from a seed: the very same for parity, race and test."""

    def refresh(self, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
        """New resident operands for the same streamed ones (each pair of a race gets fresh ones). Cheap."""
        fresh = self.inputs(self.shrink(w), seed)
        streamed = {a.name for a in self.args if a.role != "resident"}
        return {n: inputs[n] if n in streamed or not isinstance(v, Tensor) else v for n, v in fresh.items()}

    def shrink(self, w: Workload) -> Workload:
        """A workload with the same resident operands and the smallest streamed ones; `refresh` builds on it."""
        return w

    @abstractmethod
    def cases(self, w: Workload) -> tuple[Case, ...]:
        """The hostile battery at w's traits and dtype, each case's operands at most about 2 MiB together."""

    def small_inputs(self, w: Workload, seed: int) -> dict[str, Any]:
        """Inputs of a case made of domains: no more memory than its sizes need."""
        return self.inputs(w, seed)

    def affordable(self, w: Workload) -> bool:
        """May a case made of domains have this size? Its reference is computed in float64."""
        return self.bytes_moved(w) <= 2 << 20 and self.flops(w) <= 1 << 25

    def admits(self, row: Row) -> bool:
        """Have these levels of the op's domains a contracted result together? Factors that are open are missing."""
        return True

    def finish(self, inputs: dict[str, Any], draw: Draw) -> None:  # noqa: B027  (most ops have nothing to hide)
        """In a case made of domains, write junk where the contract says that it must not influence the result."""

    # --- right and wrong --------------------------------------------------------------------------------------------

    @abstractmethod
    def reference(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The outputs in float64, on the exact (quantised) inputs."""

    @abstractmethod
    def bound(self, inputs: Inputs, reference: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The largest error allowed at each element, float64: the contracted roundings, propagated to first order."""

    def verify(
        self, inputs: Inputs, got: Sequence[Tensor], baseline: Sequence[Tensor] | None = None
    ) -> Match | Mismatch:
        """Is `got` a right result? Index-valued ops override this (ties, supports)."""
        from autosel.ops.compare import compare

        reference = self.reference(inputs)
        return compare(self, got, reference, self.bound(inputs, reference), baseline)

    @abstractmethod
    def rows(self, w: Workload, inputs: Inputs, count: int, seed: int) -> Rows:
        """About `count` output rows to check in float64 at full size without computing the rest."""

    def around(self, w: Workload, inputs: Inputs, where: Tensor) -> Rows | None:
        """The part that decides the elements of the first output at `where`, int64 [n, its dimensions], worst first;
        a costly one, the first of them. None: `rows` can afford all of this op."""
        return None

    def written(self, w: Workload, inputs: Inputs) -> Written | None:
        """What this call is about to write in place; None for an op that writes its outputs alone."""
        return None

    # --- cost -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def bytes_moved(self, w: Workload, inputs: Inputs | None = None) -> int:
        """Bytes that must cross the memory bus once: each operand read once, each output written once.

        Where they depend on data (the lengths of sequences, the experts that tokens choose), `inputs` decide; without
        them the bytes are those of the inputs that `inputs(w, seed)` draws."""

    @abstractmethod
    def flops(self, w: Workload) -> int:
        """Floating-point operations; a multiply-add counts two."""

    # --- people -----------------------------------------------------------------------------------------------------

    def label(self, w: Workload) -> str:
        """Short name for tables: usually the op's; `gemv o`-like where the workload deserves one."""
        return self.name

    def arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        """The inputs in calling order."""
        return tuple(inputs[a.name] for a in self.args)

    def allocate(self, w: Workload, fill: float | None = None) -> tuple[Tensor | None, ...]:
        """Fresh tensors for the pure outputs, in order (inout results live in the arguments and are not listed)."""
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


def replace(w: Workload, **changes: Any) -> Workload:
    return dataclasses.replace(w, **changes)
