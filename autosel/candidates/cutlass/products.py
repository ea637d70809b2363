"""Matrix products with CUTLASS's headers: wgmma and TMA for Hopper, mma and cp.async for all others."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.candidates.base import Candidate
from autosel.candidates.cuda.base import PDL, CudaKernel
from autosel.knobs.gpu import cutlass as forms
from autosel.knobs.gpu import gemm
from autosel.knobs.gpu.facts import VECTOR_BYTES, Formula, GpuFacts, Limits, facts
from autosel.knobs.gpu.gemv import projection
from autosel.native import cuda, cutlass
from autosel.values import DTYPE_BYTES, Backend, Fingerprint, Knobs, NativeRecipe, Recipe, Rejected, Support, Workload

HOPPER = (9, 0)
SIDES = {"linear": ("N", "K"), "lm_head": ("V", "d")}  # dimensions whose rows are read and written 16 bytes at a time


class CutlassKernel(Candidate):
    """A kernel `kernels/cutlass/<source>.cu`: its entry takes the op's arguments, the result, then `knob_args`.

    The knobs in `macros` are compiled in as the macro named there: one instantiation per build.
    """

    backend: Backend = "CUTLASS"

    def __init__(
        self,
        op: str,
        entry: str,
        source: str,
        *,
        formula: Formula,
        knob_args: tuple[str, ...],
        macros: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.op, self.entry, self.source, self.formula, self.macros = op, entry, source, formula, macros
        self.name, self.knob_args, self.limits = f"cutlass:{source}", (*knob_args, "pdl"), limits
        # The requirements of any CUDA kernel on workload, device and compiler.
        self._cuda = CudaKernel(
            op, source, formula=formula, knob_args=knob_args, limits=limits, dtypes=("bf16", "fp16")
        )

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        answer = self._cuda.supports(w, fp)
        why = cutlass.why_not()
        return answer if isinstance(answer, Rejected) or not why else Rejected(reason=why)

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        return Knobs(settings=(*self.formula(w, facts(fp)).settings, PDL))

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        defined = (f"-D{macro}={knobs[name]}" for name, macro in self.macros.items())
        return NativeRecipe(
            source=f"{cutlass.FOLDER}/{self.source}.cu",
            entry=self.entry,
            flags=(*cuda.target_flags(facts(fp).cc), f"-DAUTOSEL_{w.dtype.upper()}", *defined),
            knob_args=self.knob_args,
        )


# --- limits -----------------------------------------------------------------------------------------------------------


def _tiles(w: Workload, f: GpuFacts) -> str:
    """Check the common requirements. The builds accept any shape, but below these they would work in 16 x 16 tiles."""
    if w.trait("greedy", 0):
        return "returns logits; the workload needs the index of the largest"
    step = VECTOR_BYTES // DTYPE_BYTES[w.dtype]
    ragged = next((name for name in SIDES[w.op] if w[name] % step), "")
    if ragged:
        return f"rows of {ragged} = {w[ragged]} elements are not whole vectors of {VECTOR_BYTES} bytes"
    first = gemm.crossover(projection(w), f)
    return "" if 2 * w["M"] >= first else f"M = {w['M']} is below half of {first}, where CUDA cores win by far"


def _hopper(w: Workload, f: GpuFacts) -> str:
    if f.cc != HOPPER:
        return f"wgmma needs compute capability 9.0; the device has {f.cc[0]}.{f.cc[1]}"
    return _tiles(w, f)


def _ampere(w: Workload, f: GpuFacts) -> str:
    most = gemm.large_from(w.dtype, f)
    if f.cc == HOPPER and w["M"] > most:
        return f"M = {w['M']} is above {most}, where mma reaches half the rate of wgmma: cutlass:gemm_sm90's range"
    return _tiles(w, f)


ENTRIES = (("linear", "gemm"), ("lm_head", "lm_head"))  # one build serves both
KERNELS = (
    *(
        CutlassKernel(
            op,
            f"{entry}_sm90",
            "gemm_sm90",
            formula=forms.hopper,
            knob_args=("split_k", "sms"),
            macros={
                "swap": "AUTOSEL_SWAP",
                "tile_m": "AUTOSEL_TILE_M",
                "tile_n": "AUTOSEL_TILE_N",
                "stages": "AUTOSEL_STAGES",
                "cluster": "AUTOSEL_CLUSTER",
                "stream_k": "AUTOSEL_STREAM_K",
            },
            limits=_hopper,
        )
        for op, entry in ENTRIES
    ),
    *(
        CutlassKernel(
            op,
            f"{entry}_sm80",
            "gemm_sm80",
            formula=forms.ampere,
            knob_args=("split_k",),
            macros={"rows": "AUTOSEL_ROWS", "columns": "AUTOSEL_COLUMNS", "stages": "AUTOSEL_STAGES"},
            limits=_ampere,
        )
        for op, entry in ENTRIES
    ),
)
