"""Common base of CUDA kernels: a GPU, nvcc, a C++ compiler, an architecture, a source for nvcc."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.candidates.gpu import GpuCandidate, too_long
from autosel.formats import PLAIN
from autosel.knobs.gpu.facts import Formula, Limits, facts
from autosel.native import cuda
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import Backend, Fingerprint, Knob, Knobs, NativeRecipe, Recipe, Workload

PDL = Knob(
    name="pdl",
    value=0,
    formula="0",
    inputs={},
    reason="1 in a step that is captured as a graph, whose kernels are launched as programmatic dependents",
)


class NvccKernel(GpuCandidate):
    """A kernel `kernels/<folder>/<source>.cu`, whose entry has the name of the source by default.

    Its entry takes the op's arguments, or `operands` (`w.codes`, ...) instead, then outputs and `knob_args`. `formula`
    gives the knobs; those in `macros` are compiled in, as the macro named there. `limits(w, facts)` returns why it
    cannot run w on the device, or "".
    """

    folder: str
    noun = "a CUDA kernel"

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
        entry: str = "",
    ) -> None:
        self.op, self.source, self.formula = op, source, formula
        self.name, self.entry = f"{self.folder}:{source}", entry or source
        self.formats, self.cache_formats, self.operands = frozenset(formats), frozenset(cache_formats), operands
        self.knob_args, self.macros = (*knob_args, "pdl"), macros or {}
        self.limits, self.dtypes = limits, dtypes

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if why := super().why_not(w, fp) or too_long(w):
            return why
        f = facts(fp)
        return cuda.why_not(f.cc) or self.limits(w, f) or ("" if find_compiler() else NO_COMPILER)

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        return Knobs(settings=(*self.formula(w, facts(fp)).settings, PDL))

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        defined = (f"-D{macro}={knobs[name]}" for name, macro in self.macros.items())
        return NativeRecipe(
            source=f"{self.folder}/{self.source}.cu",
            entry=self.entry,
            flags=(*cuda.target_flags(facts(fp).cc), f"-DAUTOSEL_{w.dtype.upper()}", *defined),
            knob_args=self.knob_args,
            operands=self.operands,
        )


class CudaKernel(NvccKernel):
    """A kernel of kernels/cuda/."""

    backend: Backend = "CUDA_EXT"
    folder = "cuda"
