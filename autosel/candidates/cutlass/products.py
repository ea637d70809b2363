"""Matrix products with CUTLASS's headers: wgmma and TMA for Hopper, mma and cp.async for all others."""

from __future__ import annotations

from autosel.candidates.cuda.base import NvccKernel
from autosel.knobs.gpu import cutlass as forms
from autosel.knobs.gpu import gemm
from autosel.knobs.gpu.facts import VECTOR_BYTES, GpuFacts
from autosel.knobs.gpu.gemv import projection
from autosel.native import cutlass
from autosel.values import DTYPE_BYTES, Backend, Fingerprint, Workload

HOPPER = (9, 0)
SIDES = {"linear": ("N", "K"), "lm_head": ("V", "d")}  # dimensions whose rows are read and written 16 bytes at a time


class CutlassKernel(NvccKernel):
    """A kernel of kernels/cutlass/: one instantiation per build."""

    backend: Backend = "CUTLASS"
    folder = cutlass.FOLDER

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        return super().why_not(w, fp) or cutlass.why_not()


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


HALVES = ("bf16", "fp16")
ENTRIES = (("linear", "gemm"), ("lm_head", "lm_head"))  # one build serves both
KERNELS = (
    *(
        CutlassKernel(
            op,
            "gemm_sm90",
            entry=f"{entry}_sm90",
            dtypes=HALVES,
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
            "gemm_sm80",
            entry=f"{entry}_sm80",
            dtypes=HALVES,
            formula=forms.ampere,
            knob_args=("split_k",),
            macros={"rows": "AUTOSEL_ROWS", "columns": "AUTOSEL_COLUMNS", "stages": "AUTOSEL_STAGES"},
            limits=_ampere,
        )
        for op, entry in ENTRIES
    ),
)
