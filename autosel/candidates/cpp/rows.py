"""Ops that process each row separately: rmsnorm, add_rmsnorm, rope, swiglu, geglu, sample."""

from __future__ import annotations

from autosel.candidates.cpp.base import CppKernel
from autosel.knobs.cpu import rows
from autosel.values import Workload

MOST_ROTATED = 1024  # kernels/cpu/rope.cpp keeps one position's sines and cosines on the stack


def _rope_limits(w: Workload) -> str:
    return f"rotates at most {MOST_ROTATED} elements of a head" if w["R"] > MOST_ROTATED else ""


KERNELS = (
    CppKernel("rmsnorm", "rmsnorm", formula=rows.rmsnorm, knob_args=("threads",)),
    CppKernel("add_rmsnorm", "add_rmsnorm", formula=rows.add_rmsnorm, knob_args=("threads",)),
    CppKernel("rope", "rope", formula=rows.rope, knob_args=("threads",), limits=_rope_limits),
    CppKernel("swiglu", "swiglu", formula=rows.swiglu, knob_args=("threads",)),
    CppKernel("geglu", "geglu", formula=rows.geglu, knob_args=("threads",)),
    CppKernel("sample", "sample", formula=rows.sample, knob_args=("threads",)),
)
