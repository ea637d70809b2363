"""Provide `--attention-backend autosel`: SGLang's own backend, whose plain decode steps run decided kernels for
`paged_attn`.

SGLang's own backend is Triton's on a GPU and PyTorch's on a CPU. It runs prompts, speculation, quantised or divided
caches, sinks, encoders and everything undecided. Pages have the size of `--page-size` (default 1; larger pages mean
fewer table entries to read). It has not served on a GPU yet; tests check that it attends to the contents of SGLang's
cache. Importing this needs SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from autosel import devices
from autosel.integrations import engine_ops

STEPS, LAYERS, CACHES = (engine_ops.Fits("SGLang") for _ in range(3))
POOL = ("page_size", "kv_cache_layout", "dtype", "store_dtype", "get_key_buffer", "get_value_buffer", "set_kv_buffer")
BATCH = ("forward_mode", "spec_info", "encoder_lens", "req_pool_indices", "seq_lens")
LAYER = (
    "layer_id", "tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "k_scale", "v_scale", "scaling",
    "is_cross_attention", "attn_type", "xai_temperature_len", "logit_cap", "logit_capping_method",
    "sliding_window_size",
)  # fmt: skip


def create(runner: Any) -> Any:
    """Return a backend for SGLang's registry. Raises ValueError for models with latent attention, as SGLang's own
    do."""
    if runner.use_mla_backend:
        raise ValueError("autosel's attention serves no latent attention (MLA): --attention-backend triton")
    if devices.on_host(torch.device(runner.device).type):
        from sglang.srt.layers.attention import torch_native_backend

        own = torch_native_backend.TorchNativeAttnBackend
    else:
        from sglang.srt.layers.attention import triton_backend

        own = triton_backend.TritonAttnBackend
    return type("AutoselAttnBackend", (DecodeSteps, own), {})(runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """Hold the data that all layers of a decode step share. `max_len` is at least every length, known on the host."""

    batch: Any
    table: Tensor  # [B, pages] int32
    lengths: Tensor  # [B] int32
    max_len: int


class DecodeSteps:
    """Run before one of SGLang's backends, whose attributes it reads."""

    needs_cpu_seq_lens = True  # the longest of a batch, without a synchronisation
    step: SharedStep | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        known = getattr(forward_batch, "seq_lens_cpu", None)
        self.step = self._step(forward_batch, None if known is None else int(known.max()))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Prepare a captured step: replays read the tables of their own batch. Its future length is unknown, so the
        maximum is used."""
        super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        self.step = self._step(forward_batch, None)

    def _step(self, batch: Any, longest: int | None) -> SharedStep | None:
        pool: Any = getattr(self, "token_to_kv_pool", None)
        another = pool is not None and not isinstance(pool, MHATokenToKVPool)
        if another or not STEPS(lambda: self._other(batch, pool)):
            return None
        plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and pool.dtype == pool.store_dtype
        if not plain or not batch.forward_mode.is_decode() or batch.spec_info is not None:
            return None
        if (
            batch.encoder_lens is not None
            or getattr(self, "dcp_size", 1) > 1
            or getattr(self, "enable_deterministic", 0)
        ):
            return None
        slots = self.req_to_token_pool.req_to_token  # type: ignore[attr-defined]  # [requests, context]: a slot a token
        # the table is a little wider than the context, for speculation, which autosel does not serve
        if longest is None:
            longest = min(slots.shape[1], getattr(self, "max_context_len", slots.shape[1]))
        first = slots[:, : longest : pool.page_size].index_select(0, batch.req_pool_indices)  # first entry of each page
        table = first if pool.page_size == 1 else first // pool.page_size
        return SharedStep(batch=batch, table=table, lengths=batch.seq_lens.to(torch.int32), max_len=longest)

    def _other(self, batch: Any, pool: Any) -> str:
        """Return how this SGLang differs from the interface that a step is read from here."""
        lacking = engine_ops.lacking
        return (
            lacking(self, "token_to_kv_pool", "req_to_token_pool") or lacking(pool, *POOL) or lacking(batch, *BATCH)
            or lacking(batch.forward_mode, "is_decode") or lacking(KVWriteLoc, "for_batch")
        )  # fmt: skip

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **named: Any
    ) -> Tensor:
        step = self.step
        if step is not None and step.batch is forward_batch and self._serves(q, k, layer, named):
            if save_kv_cache:
                location = KVWriteLoc.for_batch(forward_batch)
                self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)  # type: ignore[attr-defined]
                save_kv_cache = False
            rows = q.reshape(-1, layer.tp_q_head_num, 1, layer.qk_head_dim)
            out = torch.empty_like(rows)
            if self._decided(step, rows, layer, out):
                return out.view(len(rows), -1)
        else:
            engine_ops.PAGED.leave("speculation, a quantised cache or another layout of it")
        made: Tensor = super().forward_decode(  # type: ignore[misc]
            q, k, v, layer, forward_batch, save_kv_cache, **named
        )
        return made

    def _serves(self, q: Tensor, k: Tensor | None, layer: Any, named: dict[str, Any]) -> bool:
        known = LAYERS(lambda: engine_ops.lacking(layer, *LAYER))
        return known and self._plain(q, k, layer, named) and CACHES(lambda: self._unpaged(layer))

    def _unpaged(self, layer: Any) -> str:
        """Return why a layer's cache cannot be read as pages, or ""."""
        pool = self.token_to_kv_pool  # type: ignore[attr-defined]
        for held in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)):
            wanted = (layer.tp_k_head_num, layer.qk_head_dim)
            if held.dim() != 3 or held.shape[1:] != wanted or len(held) % pool.page_size or not held.is_contiguous():
                return f"its cache is {list(held.shape)}, where [tokens, {wanted[0]}, {wanted[1]}] in pages is read"
        return ""

    def _plain(self, q: Tensor, k: Tensor | None, layer: Any, named: dict[str, Any]) -> bool:
        return (
            k is not None
            and q.dtype == self.token_to_kv_pool.dtype  # type: ignore[attr-defined]
            and layer.qk_head_dim == layer.v_head_dim
            and layer.k_scale is None
            and layer.v_scale is None
            and not layer.is_cross_attention
            and layer.attn_type == AttentionType.DECODER
            and layer.xai_temperature_len <= 0
            and (not layer.logit_cap or layer.logit_capping_method == "tanh")
            and all(value is None for value in named.values())  # sinks, score_mod
        )

    def _decided(self, step: SharedStep, rows: Tensor, layer: Any, out: Tensor) -> bool:
        pool = self.token_to_kv_pool  # type: ignore[attr-defined]
        pages = (-1, pool.page_size, layer.tp_k_head_num, layer.qk_head_dim)
        return engine_ops.paged(
            rows,
            pool.get_key_buffer(layer.layer_id).view(pages),
            pool.get_value_buffer(layer.layer_id).view(pages),
            step.table,
            step.lengths,
            step.max_len,
            scale=layer.scaling,
            window=layer.sliding_window_size + 1,  # SGLang counts keys before the token itself; -1: no window
            softcap=float(layer.logit_cap or 0.0),
            out=out,
        )
