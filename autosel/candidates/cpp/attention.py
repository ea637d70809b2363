"""Attention over a cache, contiguous or paged, causal prefill, and the append to a cache."""

from __future__ import annotations

from autosel.candidates.cpp.base import CppKernel
from autosel.knobs.cpu import attention

DECODE = ("threads", "tile", "chunk", "prefetch")

KERNELS = (
    CppKernel("attn", "attn_decode", formula=attention.decode, knob_args=DECODE),
    CppKernel("paged_attn", "paged_attn_decode", formula=attention.decode, knob_args=DECODE),
    CppKernel("prefill_attn", "attn_prefill", formula=attention.prefill, knob_args=("threads",)),
    CppKernel("kv_append", "kv_append", formula=attention.append, knob_args=("threads",)),
)
