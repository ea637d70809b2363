"""Sampling: tokens from logits."""

from __future__ import annotations

from autosel.candidates.cpp.base import CppKernel
from autosel.knobs.cpu import rows

KERNELS = (CppKernel("sample", "sample", formula=rows.sample, knob_args=("threads",)),)
