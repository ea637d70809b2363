"""A mistake of PyTorch's bf16 product on CPUs with AMX, which proofs find."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F


@cache
def products_leak() -> bool:
    """Return True if PyTorch's bf16 product gives NaN in the row before one with an infinity.

    oneDNN multiplies tiles of 32 elements of K. Where K ends earlier, it multiplies the next row, or what follows the
    last one in memory, by zeros (torch 2.13.0, Granite Rapids; not with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16).
    """
    x = torch.zeros(34, 33, dtype=torch.bfloat16)
    x[17, 0] = math.inf
    return bool(F.linear(x, torch.ones(563, 33, dtype=torch.bfloat16))[16].isnan().any())
