"""Replace sgl-kernel 0.3 and sglang-kernel 0.4.10 (except the rotation, which only 0.3 has)."""

from __future__ import annotations

from typing import Any

import flashinfer
from torch import Tensor


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    return flashinfer.rmsnorm(input, weight, eps, out)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    return flashinfer.gemma_rmsnorm(input, weight, eps, out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    flashinfer.fused_add_rmsnorm(input, residual, weight, eps)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    flashinfer.gemma_fused_add_rmsnorm(input, residual, weight, eps)


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
