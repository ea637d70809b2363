"""Replace flashinfer-python 0.7.2.post1: its signatures, refusals and in-place results; PyTorch's arithmetic.

An address or a stride on which its kernels would fault is refused here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from arithmetic import attention, normalised, rotated_by_table, straight
from torch import Tensor


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    straight(input, weight)
    return _into(out, normalised(input, weight, eps, 0.0))


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    straight(input, weight)
    return _into(out, normalised(input, weight, eps, 1.0))


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _add(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _add(input, residual, weight, eps, 1.0)


norm = SimpleNamespace(gemma_rmsnorm=gemma_rmsnorm, gemma_fused_add_rmsnorm=gemma_fused_add_rmsnorm)


def _add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    straight(x, residual, weight)
    residual += x
    x.copy_(normalised(residual, weight, eps, offset))


def _into(out: Tensor | None, made: Tensor) -> Tensor:
    if out is None:
        return made
    straight(out)
    return out.copy_(made)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    assert cos_sin_cache.is_contiguous() and positions.is_contiguous()
    for heads in (query, key):
        straight(heads)
        view = heads.view(heads.shape[0], -1, head_size)
        view.copy_(rotated_by_table(view, cos_sin_cache[positions.long()], is_neox))


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, out, torch.nn.functional.silu)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, out, lambda g: torch.nn.functional.gelu(g, approximate="tanh"))


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, out, torch.nn.functional.gelu)


def _gated(x: Tensor, out: Tensor | None, activation: Any) -> Tensor:
    if x.shape[-1] * x.element_size() % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    straight(x)
    gate, up = x.float().chunk(2, -1)
    return _into(out, (activation(gate) * up).to(x.dtype))


def mm_bf16(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    pdl: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> Tensor:
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise ValueError("Only bfloat16 is supported.")
    if bias is not None and backend not in ("tgv", "tinygemm", "cute-dsl", "cublaslt"):
        raise ValueError(f"the {backend} backend takes no bias")
    straight(a, b.t())
    assert a.is_contiguous() and b.t().is_contiguous() and (bias is None or bias.is_contiguous())
    made = a.float() @ b.float()
    return _into(out, (made if bias is None else made + bias.float()).to(out_dtype))


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    straight(q, k, v)
    assert use_tensor_cores or all(t.is_contiguous() for t in (q, k, v))
    keys, values = (t.transpose(0, 1) if kv_layout == "HND" else t for t in (k, v))
    return attention(q, keys, values, sm_scale or q.shape[-1] ** -0.5, window_left, logits_soft_cap or 0.0)


class BatchDecodeWithPagedKVCacheWrapper:
    """Plan with lengths; `run` uses the plan, and the list of pages if the plan was given it."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph and float_workspace_buffer.dtype == torch.uint8
        self.cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr[-1] == len(indices) and bool((last_page_len >= 1).all() and (last_page_len <= page_size).all())
        assert bool((indptr.diff() >= 1).all()) and self.cores | (
            num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        )
        self.starts, self.last, self.indices = indptr.tolist(), last_page_len.tolist(), indices.to(indices.device)
        self.shape, self.dtypes = (num_qo_heads, num_kv_heads, head_dim, page_size), (q_data_type, kv_data_type)
        self.window, self.cap, self.scale = window_left, logits_soft_cap or 0.0, sm_scale or head_dim**-0.5

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None, return_lse: bool = False
    ) -> Tensor:
        k, v = paged_kv_cache
        straight(q, k, v)
        assert k.stride() == v.stride() and (q.dtype, k.dtype) == self.dtypes
        assert (q.shape[1], k.shape[2], q.shape[2], k.shape[1]) == self.shape and len(q) == len(self.last)
        made = []
        for i, last in enumerate(self.last):
            pages = self.indices[self.starts[i] : self.starts[i + 1]].long()
            assert bool((pages >= 0).all() and (pages < len(k)).all()), "a page does not exist"
            keys, values = (t[pages].flatten(0, 1)[: (len(pages) - 1) * k.shape[1] + last] for t in (k, v))
            made.append(attention(q[i], keys, values, self.scale, self.window, self.cap))
        return torch.stack(made)


def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
) -> None:
    straight(q, k_cache, v_cache, output)
    assert seq_lens.dtype == torch.uint32 and seq_lens.shape == q.shape[:2] and page_table.dtype == torch.int32
    assert q.shape[1] == 1 and output.shape == q.shape and output.dtype == q.dtype and page_table.is_contiguous()
    assert k_cache.stride() == v_cache.stride() and k_cache.shape[1:3] == (page_size, num_kv_heads)
    assert page_size in (16, 32, 64, 128) and not semaphores.any() and kv_layout == "NHD"
    scale = float(q_scale) * q.shape[-1] ** -0.5
    for i, length in enumerate(seq_lens[:, 0].tolist()):
        assert length >= 1
        pages = page_table[i, : -(-length // page_size)].long()
        keys, values = (
            torch.where((pages >= 0)[:, None, None, None], t[pages.clamp(min=0)], 0.0).flatten(0, 1)[:length]
            for t in (k_cache, v_cache)
        )
        output[i, 0] = attention(q[i, 0], keys, values, scale, sliding_win_size - 1, 0.0)
