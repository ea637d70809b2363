"""Replace sgl-kernel 0.3 and sglang-kernel 0.4.10 (except the rotation, which only 0.3 has)."""

from __future__ import annotations

from typing import Any

import flashinfer
from flashinfer import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from torch import Tensor

__all__ = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "rmsnorm"]  # with the same signatures


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    fused_set_kv_buffer_arg: Any = None,
    enable_pdl: bool | None = None,
) -> None:
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)


def silu_and_mul(input: Tensor, out: Tensor = None) -> Tensor:
    return flashinfer.silu_and_mul(input, out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor = None) -> Tensor:
    return flashinfer.gelu_tanh_and_mul(input, out)


def gelu_and_mul(input: Tensor, out: Tensor = None) -> Tensor:
    return flashinfer.gelu_and_mul(input, out)
