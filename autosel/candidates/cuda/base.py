"""Common base of CUDA kernels: a GPU, nvcc, a C++ compiler, an architecture, a source below kernels/cuda/."""

from __future__ import annotations

from collections.abc import Mapping

from autosel import devices
from autosel.candidates.base import Candidate
from autosel.formats import PLAIN
from autosel.knobs.gpu.facts import Formula, Limits, facts
from autosel.native import cuda
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import (
    Accepted,
    Backend,
    Fingerprint,
    Knob,
    Knobs,
    NativeRecipe,
    Recipe,
    Rejected,
    Support,
    Workload,
)

MOST_ELEMENTS = 2**31 - 1  # per dimension: kernels index within one in 32 bits
PDL = Knob(
    name="pdl",
    value=0,
    formula="0",
    inputs={},
    reason="1 in a step that is captured as a graph, whose kernels are launched as programmatic dependents",
)


class CudaKernel(Candidate):
    """A kernel `kernels/cuda/<source>.cu`.

    Its entry takes the op's arguments, or `operands` (`w.codes`, ...) instead, then outputs and `knob_args`. `formula`
    gives the knobs; those in `macros` are compiled in, as the macro named there. `limits(w, facts)` returns why it
    cannot run w on the device, or "".
    """

    backend: Backend = "CUDA_EXT"

    def __init__(
        self,
        op: str,
        source: str,
        *,
        formula: Formula,
        knob_args: tuple[str, ...],
        macros: Mapping[str, str] | None = None,
        limits: Limits = lambda w, f: "",
        dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32"),
        formats: tuple[str, ...] = (PLAIN,),
        cache_formats: tuple[str, ...] = (PLAIN,),
        operands: tuple[str, ...] = (),
    ) -> None:
        self.op, self.source, self.formula = op, source, formula
        self.name = f"cuda:{source}"
        self.formats, self.cache_formats, self.operands = frozenset(formats), frozenset(cache_formats), operands
        self.knob_args, self.macros = (*knob_args, "pdl"), macros or {}
        self.limits, self.dtypes = limits, dtypes

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        if w.dtype not in self.dtypes:
            return Rejected(reason=f"supports {', '.join(self.dtypes)}; the workload is {w.dtype}")
        if not devices.runs(fp.kind, "CUDA"):
            return Rejected(reason="a CUDA kernel; the device is a CPU")
        too_long = [name for name, size in w.dims if size > MOST_ELEMENTS]
        if too_long:
            return Rejected(reason=f"{too_long[0]} = {w[too_long[0]]} is above 2^31 - 1")
        f = facts(fp)
        why = cuda.why_not(f.cc) or self.limits(w, f)
        if why:
            return Rejected(reason=why)
        if find_compiler() is None:
            return Rejected(reason=NO_COMPILER)
        return Accepted()

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        return Knobs(settings=(*self.formula(w, facts(fp)).settings, PDL))

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        defined = (f"-D{macro}={knobs[name]}" for name, macro in self.macros.items())
        return NativeRecipe(
            source=f"cuda/{self.source}.cu",
            entry=self.source,
            flags=(*cuda.target_flags(facts(fp).cc), f"-DAUTOSEL_{w.dtype.upper()}", *defined),
            knob_args=self.knob_args,
            operands=self.operands,
        )
