"""The projections: linear by two kernels (few rows of x, many rows), and the fused ones, which do both."""

from __future__ import annotations

from autosel.candidates.triton.base import TritonKernel, also, joined, pdl, shared, without_e4m3
from autosel.knobs.gpu import gemm, gemv
from autosel.knobs.gpu.facts import GpuFacts, Limits
from autosel.knobs.gpu.gemv import projection
from autosel.values import Knob, Knobs, Workload

FEW = gemv.M_MOST
MOST_FUSED = 64  # rows whose norm each program may compute again, from L2
MOST_NAMED = 128  # rows whose greedy tokens one program column holds
MOST_VOCABULARY = 1 << 24  # indices are stored as fp32


def _few(w: Workload, f: GpuFacts) -> str:
    return "" if w["M"] <= FEW else f"M = {w['M']} is above {FEW}: triton:gemm's range"


def _at_most(most: int, instead: str) -> Limits:
    return lambda w, f: "" if w["M"] <= most else f"supports up to {most} rows, {instead}; M = {w['M']}"


def _head(w: Workload, f: GpuFacts) -> str:
    if not w.trait("greedy", 0):
        return ""
    if w["V"] > MOST_VOCABULARY:
        return f"supports a vocabulary up to {MOST_VOCABULARY}; V = {w['V']}"
    return _at_most(MOST_NAMED, "without a limit if it returns logits")(w, f)


def _few_fp8(w: Workload, f: GpuFacts) -> str:
    return without_e4m3(f) or ("" if w["M"] <= FEW else f"supports up to {FEW} rows; M = {w['M']}")


def tiled(w: Workload, f: GpuFacts) -> Knobs:
    """Return knobs for streaming up to M2 rows and large tiles above, as gemm.route, without its CUDA core range."""
    return gemm.stream(w, f) if w["M"] <= gemm.large_from(w.dtype, f) else gemm.large(w, f)


def either(w: Workload, f: GpuFacts) -> Knobs:
    """Return knobs for CUDA cores while their accumulators suffice for the rows, else for tiles."""
    return also(gemv.gemv, pdl)(w, f) if w["M"] <= FEW else also(tiled, shared)(w, f)


def fused(w: Workload, f: GpuFacts) -> Knobs:
    return also(gemv.gemv, pdl)(w, f) if w["M"] <= FEW else also(gemm.stream, shared)(w, f)


def head(w: Workload, f: GpuFacts) -> Knobs:
    """Return knobs of the head. The greedy kernel writes a maximum per program, so there are only resident programs."""
    if not w.trait("greedy", 0):
        return either(w, f)
    if w["M"] > FEW:
        return also(gemm.stream, shared)(w, f)
    made = either(w, f)
    programs = made["ctas_per_sm"] * f.sms
    inputs = {"c": made["ctas_per_sm"], "S": f.sms, "V": projection(w).outputs}
    return joined(made, Knob(name="programs", value=programs, formula="c * S", inputs=inputs))


KERNELS = (
    TritonKernel("linear", "gemv", formula=also(gemv.gemv, pdl), limits=_few),
    TritonKernel("linear", "gemm", formula=also(tiled, shared)),
    TritonKernel(
        "linear",
        "gemv_fp8",
        formula=also(gemv.gemv, pdl),
        limits=_few_fp8,
        formats=("fp8_e4m3-row",),
        operands=("x", "w.codes", "w.scales", "bias", "residual"),
    ),
    *(
        TritonKernel(op, op, formula=fused, limits=_at_most(MOST_FUSED, "above, a separate norm is faster"))
        for op in ("norm_qkv", "gate_up")
    ),
    TritonKernel("lm_head", "lm_head", formula=head, limits=_head),
)
