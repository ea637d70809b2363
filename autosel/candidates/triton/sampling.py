"""Sampling: tokens from logits."""

from __future__ import annotations

from autosel.candidates.triton.base import TritonKernel
from autosel.knobs.gpu import sampling
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Workload

MOST_VOCABULARY = 1 << 24  # counts are stored as fp32


def _limits(w: Workload, f: GpuFacts) -> str:
    return "" if w["V"] <= MOST_VOCABULARY else f"supports a vocabulary up to {MOST_VOCABULARY}; V = {w['V']}"


KERNELS = (TritonKernel("sample", "sample", formula=sampling.sample, limits=_limits),)
