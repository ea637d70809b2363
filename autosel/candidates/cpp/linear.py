"""The projections: linear by two kernels (few rows of x, many), and the fused ones, which hold both ways."""

from __future__ import annotations

from autosel.candidates.cpp.base import CppKernel
from autosel.knobs.cpu import linear
from autosel.values import Workload

WALK = ("k_block", "k_ahead", "m_block")
FEWEST_FOR_GEMM = 5  # below, turning the weights costs more than the multiplies: never seen to win


def _few(w: Workload) -> str:
    if w["M"] <= linear.MAX_ROWS:
        return ""
    return f"M = {w['M']} is above {linear.MAX_ROWS}: cpp:gemm's range"


def _many(w: Workload) -> str:
    return "" if w["M"] >= FEWEST_FOR_GEMM else f"M = {w['M']} is below {FEWEST_FOR_GEMM}: cpp:gemv's range"


KERNELS = (
    CppKernel("linear", "gemv", formula=linear.gemv, knob_args=("threads", "rows"), limits=_few),
    CppKernel("linear", "gemm", formula=linear.gemm, knob_args=("threads", *WALK), limits=_many),
    *(
        CppKernel(op, op, formula=linear.fused, knob_args=("threads", "rows", *WALK))
        for op in ("norm_qkv", "gate_up", "lm_head")
    ),
)
