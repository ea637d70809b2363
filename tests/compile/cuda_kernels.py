"""Call the CUDA kernels as a worker calls them, with NaN in their outputs, and judge their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from autosel.candidates.cuda.base import CudaKernel
from autosel.candidates.registry import own_candidates
from autosel.ops import OPS
from autosel.ops.contract import Case, Inputs, Mismatch
from autosel.parity.truth import run_baseline
from autosel.values import DTypeName, Workload
from tests.operands import passed, traits_of

KERNELS = {c.source: c for c in own_candidates() if isinstance(c, CudaKernel)}
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")

Entry = Callable[..., None]
Knobs = Sequence[int]
Battery = Iterator[tuple[Case, Knobs]]  # cases, and the knobs of the call that runs each


def compiled_in(source: str, rows: int = 1, unroll: int = 4) -> tuple[str, ...]:
    """Return the macros of a projection's build; none for other kernels."""
    return (f"AUTOSEL_ROWS={rows}", f"AUTOSEL_UNROLL={unroll}") if KERNELS[source].macros else ()


def workload(source: str, dtype: DTypeName, dims: dict[str, int], **traits: Any) -> Workload:
    """Return the workload in the format that the kernel reads."""
    return OPS[KERNELS[source].op].workload(dtype, dims, **traits, **traits_of(KERNELS[source]))


def results_of(entry: Entry, w: Workload, inputs: Inputs, knobs: Knobs, operands: Sequence[str] = ()) -> list[Tensor]:
    """Return what a call writes: new outputs, or the caches to which it appends."""
    op = OPS[w.op]
    outputs = [o for o in op.allocate(w, fill=float("nan")) if o is not None]
    entry(*passed(op, inputs, operands), *outputs, *knobs)
    return outputs or [inputs["k_cache"], inputs["v_cache"]]


def failure(entry: Entry, made: Case, knobs: Knobs, operands: Sequence[str] = ()) -> Mismatch | None:
    """Return the fault in a case, by float64 and by the baseline's error."""
    op = OPS[made.workload.op]
    results = results_of(entry, made.workload, made.make(11), knobs, operands)
    found = op.verify(made.make(11), results, run_baseline(op, made.make(11)))
    return found if isinstance(found, Mismatch) else None


def faults(battery: Iterable[tuple[Case, Knobs]], failure_of: Callable[[Case, Knobs], Mismatch | None]) -> list[str]:
    """Return the faults in a battery."""
    tried = ((made, knobs, failure_of(made, knobs)) for made, knobs in battery)
    return [
        f"{made.workload.key} {made.name}, {knobs}: {found.check}: {found.reason}"
        for made, knobs, found in tried
        if found is not None
    ]
