"""Provide `--attention-backend CUSTOM`: vLLM's Triton backend, whose plain decode steps run decided kernels for
`paged_attn`.

Prompts, mixed batches, quantised caches, sinks, ALiBi, batch invariance and everything undecided run vLLM's own kernel.
Importing this needs vLLM and Triton. It has not served on a GPU yet; tests check that it attends to the contents of
vLLM's cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from autosel.integrations import engine_ops

PLAIN_CACHES = ("auto", "float16", "bfloat16")
FITS = engine_ops.Fits("vLLM")
METADATA = (
    "max_query_len", "num_actual_tokens", "seq_lens", "block_table", "max_seq_len", "mm_prefix_range",
    "rswa_prefix_lens",
)  # fmt: skip
IMPLEMENTATION = (
    "attn_type", "kv_cache_dtype", "alibi_slopes", "sinks", "chunk_lookback", "num_heads", "head_size", "scale",
    "sliding_window", "logits_soft_cap",
)  # fmt: skip


class AutoselAttentionImpl(TritonAttentionImpl):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        self.model = config.model_config if config is not None else None  # its longest context may still change

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            self._left("a quantised output")
        elif self._decode(query, kv_cache, attn_metadata, output):
            return output
        made: Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        return made

    def _decode(self, query: Tensor, kv_cache: Tensor, m: Any, output: Tensor) -> bool:
        """Run one token per sequence. kv_cache [blocks, Hkv, block, 2 D]: keys, then values."""
        if m is None:  # a profiling run
            return False
        if not FITS(lambda: self._other(kv_cache, m)):
            return self._left(f"another interface: {FITS.why}")
        n = m.num_actual_tokens
        if m.max_query_len != 1 or m.seq_lens.shape[0] < n:
            return self._left("a prompt, or a batch with one")
        if not self._plain(m) or kv_cache.dtype != query.dtype:
            return self._left("quantised cache, sinks, ALiBi or batch invariance")
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return engine_ops.paged(
            query[:n].view(n, self.num_heads, 1, self.head_size),
            k,
            v,
            m.block_table[:n],
            m.seq_lens[:n],
            int(m.max_seq_len),
            scale=self.scale,
            window=self.sliding_window[0] + 1,  # vLLM's (w - 1, 0); (-1, -1) without one
            softcap=float(self.logits_soft_cap),
            out=output[:n].view(n, self.num_heads, 1, self.head_size),
            longest=self.model.max_model_len if self.model is not None else 0,  # the maximum for which vLLM captures
        )

    def _left(self, reason: str) -> bool:
        engine_ops.PAGED.leave(reason)
        return False

    def _other(self, kv_cache: Tensor, m: Any) -> str:
        """Return how this vLLM differs from the interface that a step is read from here."""
        absent = engine_ops.lacking(m, *METADATA) or engine_ops.lacking(self, *IMPLEMENTATION)
        if not absent and (kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size):
            return f"its cache is {list(kv_cache.shape)}, where [blocks, heads, block, {2 * self.head_size}] is read"
        return absent

    def _plain(self, m: Any) -> bool:
        return (
            self.attn_type == AttentionType.DECODER
            and self.kv_cache_dtype in PLAIN_CACHES
            and self.alibi_slopes is None
            and self.sinks is None
            and self.chunk_lookback == -1
            and m.mm_prefix_range is None
            and m.rswa_prefix_lens is None
            and not envs.VLLM_BATCH_INVARIANT  # a kernel decided for one batch may round differently from another's
        )


class AutoselAttentionBackend(TritonAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AutoselAttentionImpl]:
        return AutoselAttentionImpl
