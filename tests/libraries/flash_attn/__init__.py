"""Replace flash-attn 2.8: its signature and refusals; PyTorch's arithmetic."""

from __future__ import annotations

import torch
from arithmetic import cached_attention
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    assert block_table is None or (block_table.dtype == torch.int32 and k_cache.shape[1] % 256 == 0)
    assert causal and window_size[1] == (0 if window_size[0] >= 0 else -1)
    return cached_attention(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window_size[0], softcap)
