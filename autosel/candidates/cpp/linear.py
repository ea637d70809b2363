"""The projections: linear by two kernels (few rows of x, many rows), and the fused ones, which do both.

Each also has a kernel for weights as codes of 4 to 8 bits, and one for plain weights in a lossless layout of 12 bits,
for few rows only.
"""

from __future__ import annotations

from dataclasses import replace

from autosel.candidates.cpp.base import CppKernel, Formula, Limits
from autosel.formats import CODED, WITH_ZEROS, WeightFormat
from autosel.knobs.cpu import linear
from autosel.knobs.cpu.facts import facts
from autosel.values import Fingerprint, Knobs, Layout, NativeRecipe, Recipe, Workload

WALK, CODED_WALK = ("k_block", "k_ahead", "m_block"), ("k_block", "m_block")
CODED_LINEAR = ("x", "w.codes", "w.scales", "bias", "residual")
GATE_UP = (
    "x", "norm_weight", "w_gate.codes", "w_gate.scales", "w_up.codes", "w_up.scales", "eps", "offset", "activation",
)  # fmt: skip
GATE_UP_PACKED = (
    "x", "norm_weight", "w_gate", "w_gate.packed", "w_up", "w_up.packed", "eps", "offset", "activation",
)  # fmt: skip
MOST_CODED = 4 * linear.MAX_ROWS  # passes over the weights
SCALES = {"bf16": "bf16", "fp16": "f16", "fp32": "float"}  # of a part's dtype: the kernels' type
IN_BLOCKS = {"q4_k": "Q4K", "q6_k": "Q6K", "q6_k-m": "Q6KM"}  # of a format's scaling: the kernels' type
FEWEST_FOR_GEMM = 5  # below, converting the weights costs more than the multiplications: it never wins


def lossless_12(*weights: str) -> Layout:
    """Return the layout of kernels/cpu/packed.h: each bf16 weight in 12 bits, without loss."""
    return Layout(
        name="lossless-12",
        version=3,  # kPackedVersion
        weights=weights,
        prepare="pack",
        compare="compare",
        share=0.75,
        worth=0.9,
    )


class PackedKernel(CppKernel):
    """A kernel for bf16 weights in 12 bits; without prepared weights it runs as the plain kernel."""

    def __init__(self, op: str, source: str, operands: tuple[str, ...], *weights: str) -> None:
        super().__init__(
            op,
            f"{source}_packed",
            formula=linear.gemv,
            knob_args=("threads", "rows"),
            limits=_few,
            dtypes=("bf16",),
            operands=operands,
            layout=lossless_12(*weights),
        )

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        portable = "the kernel needs AVX2, which this CPU lacks"
        return super().why_not(w, fp) or (portable if facts(fp).isa == "portable" else "")


def _few(w: Workload) -> str:
    if w["M"] <= linear.MAX_ROWS:
        return ""
    return f"M = {w['M']} is above {linear.MAX_ROWS}: the range of gemm"


def _many(w: Workload) -> str:
    return "" if w["M"] >= FEWEST_FOR_GEMM else f"M = {w['M']} is below {FEWEST_FOR_GEMM}: the range of gemv"


def _few_coded(w: Workload) -> str:
    """Refuse more rows, where reading the codes once for every eight of them costs more than making weights of them."""
    return "" if w["M"] <= MOST_CODED else f"M = {w['M']} is above {MOST_CODED}: the range of gemm"


def code_flags(*formats: WeightFormat, dtype: str) -> tuple[str, ...]:
    """Return the flags of a build that reads these formats of codes, by their numbers (kernels/cpu/coded.h)."""
    return (f"-DAUTOSEL_FORMATS={','.join(_cpp_type(found, dtype) for found in formats)}",) if formats else ()


def _cpp_type(found: WeightFormat, dtype: str) -> str:
    if found.scaling in IN_BLOCKS:
        return IN_BLOCKS[found.scaling]
    scale = SCALES[next(p.dtype or dtype for p in found.parts if p.name == "scales")]
    if found.code == "e4m3":
        return f"Floating<{found.group},{scale}>"
    if found.scaling == "pair":
        return f"Affine<{found.group},{scale}>"
    kind = "Asymmetric" if found.scaling in WITH_ZEROS else "Symmetric"
    return f"{kind}<{found.bits},{found.group},{scale}>"


class CodedKernel(CppKernel):
    """A kernel for weights as codes with scales; a build serves one format."""

    def __init__(
        self,
        op: str,
        source: str,
        operands: tuple[str, ...],
        *,
        formula: Formula = linear.fused_coded,
        knob_args: tuple[str, ...] = ("threads", "rows", *CODED_WALK),
        limits: Limits = lambda w: "",
    ) -> None:
        super().__init__(
            op,
            f"{source}_coded",
            formula=formula,
            knob_args=knob_args,
            limits=limits,
            formats=CODED,
            operands=operands,
        )

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        found = super().recipe(w, fp, knobs)
        assert isinstance(found, NativeRecipe)
        return replace(found, flags=(*found.flags, *code_flags(w.weight_format, dtype=w.dtype)))


KERNELS = (
    CppKernel("linear", "gemv", formula=linear.gemv, knob_args=("threads", "rows"), limits=_few),
    CppKernel("linear", "gemm", formula=linear.gemm, knob_args=("threads", *WALK), limits=_many),
    *(
        CppKernel(op, op, formula=linear.fused, knob_args=("threads", "rows", *WALK))
        for op in ("norm_qkv", "gate_up", "lm_head")
    ),
    CodedKernel("linear", "gemv", CODED_LINEAR, formula=linear.gemv, knob_args=("threads", "rows"), limits=_few_coded),
    CodedKernel(
        "linear", "gemm", CODED_LINEAR, formula=linear.gemm_coded, knob_args=("threads", *CODED_WALK), limits=_many
    ),
    CodedKernel("norm_qkv", "norm_qkv", ("x", "norm_weight", "w.codes", "w.scales", "eps", "offset")),
    CodedKernel("gate_up", "gate_up", GATE_UP),
    CodedKernel("lm_head", "lm_head", ("x", "w.codes", "w.scales", "greedy")),
    PackedKernel("linear", "gemv", ("x", "w", "w.packed", "bias", "residual"), "w"),
    PackedKernel("norm_qkv", "norm_qkv", ("x", "norm_weight", "w", "w.packed", "eps", "offset"), "w"),
    PackedKernel("gate_up", "gate_up", GATE_UP_PACKED, "w_gate", "w_up"),
    PackedKernel("lm_head", "lm_head", ("x", "w", "w.packed", "greedy"), "w"),
)
