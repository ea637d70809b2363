"""rmsnorm and its neighbours: ops that treat each row on its own."""

from __future__ import annotations

from autosel.candidates.cpp.base import CppKernel
from autosel.knobs.cpu import rows

KERNELS = (CppKernel("rmsnorm", "rmsnorm", formula=rows.rmsnorm, knob_args=("threads",)),)
