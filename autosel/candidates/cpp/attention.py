"""Attention over a cache, contiguous or paged, causal prefill, and the append to a cache."""

from __future__ import annotations

from autosel.candidates.cpp.base import CppKernel
from autosel.knobs.cpu import attention

DECODE = ("threads", "tile", "chunk", "prefetch")

KERNELS = (
    CppKernel("attn", "attn_decode", formula=attention.decode, knob_args=DECODE),
    CppKernel("paged_attn", "paged_attn_decode", formula=attention.decode, knob_args=DECODE),
)
