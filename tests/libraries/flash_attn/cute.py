"""Replace flash-attn-4 4.0.0b36: the used part of its signature; PyTorch's arithmetic."""

from __future__ import annotations

import torch
from arithmetic import cached_attention
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    num_splits: int = 1,
) -> tuple[Tensor, None]:
    assert causal and (seqused_k is None or (seqused_k.dtype == torch.int32 and seqused_k.is_contiguous()))
    assert page_table is None or (page_table.dtype == torch.int32 and page_table.stride(-1) == 1)
    lengths = k.shape[1] if seqused_k is None else seqused_k
    left = -1 if window_size[0] is None else window_size[0]
    return cached_attention(q, k, v, lengths, page_table, softmax_scale, left, softcap), None
