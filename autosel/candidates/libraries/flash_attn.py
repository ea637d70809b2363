"""flash-attn: attention over a cache, contiguous or paged, in three generations that can be installed together.

Signatures: `flash_attn_with_kvcache` of 2.8 (pages a multiple of 256 tokens) and of 3.0.0, which calls the block table
`page_table`; `flash_attn.cute.flash_attn_varlen_func` of 4.0.0b36, which takes sequences of one length with `seqused_k`
and also returns values for training. Their window counts the keys before the query's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autosel.candidates.libraries.base import Library, LibraryKernel, Limits, aligned, narrow_heads
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

FLASH_ATTN = Library(
    distribution="flash-attn", module="flash_attn", least_version=(2, 6, 0), needs=("flash_attn_with_kvcache",)
)
FLASH_ATTN_3 = Library(
    distribution="flash-attn-3",
    module="flash_attn_interface",
    least_version=(3, 0, 0),
    least_cc=(9, 0),
    most_cc=(9, 0),
    needs=("flash_attn_with_kvcache",),
)
FLASH_ATTN_4 = Library(
    distribution="flash-attn-4",
    module="flash_attn.cute",
    least_version=(4, 0, 0),
    needs=("flash_attn_varlen_func",),
    compiles_s=200.0,
)
PAGE = 256
WIDEST_HEAD = 256
WIDEST_HEAD_BY_CUTE = {9: 256}  # 128 elsewhere


def _called(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Any, scale: float, window: int, softcap: float
) -> Tensor:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found,unused-ignore]

    span = (window - 1, 0) if window else (-1, -1)
    cache = {"cache_seqlens": lengths, "block_table": table}
    return _attended(flash_attn_with_kvcache, q, k, v, scale, span, softcap, **cache)


def _called_3(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Any, scale: float, window: int, softcap: float
) -> Tensor:
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found,unused-ignore]

    span = (window - 1, 0) if window else (-1, -1)
    cache = {"cache_seqlens": lengths, "page_table": None if table is None else table.contiguous()}
    return _attended(flash_attn_with_kvcache, q, k, v, scale, span, softcap, **cache)


def _called_4(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Any, scale: float, window: int, softcap: float
) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    span = (window - 1, 0) if window else (None, None)
    own = None if isinstance(lengths, int) else lengths  # all as long as the cache
    cache = {"seqused_k": own, "page_table": None if table is None else table.contiguous()}
    # num_splits=0: as many as its heuristic chooses
    return _attended(flash_attn_varlen_func, q, k, v, scale, span, softcap, num_splits=0, **cache)


def _attended(
    function: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, span: tuple[Any, Any], softcap: float, **cache: Any
) -> Tensor:
    """Call flash-attn on q[B,Hq,S,D], and on pages or a contiguous cache [.., tokens, Hkv, D]."""
    made = function(
        aligned(q.transpose(1, 2)),
        aligned(k),
        aligned(v),
        softmax_scale=scale or None,
        causal=True,
        window_size=span,
        softcap=softcap,
        **cache,
    )
    out: Tensor = made[0] if isinstance(made, tuple) else made
    return out.transpose(1, 2)


def _ops(called: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return `attn` and `paged_attn` by the call of one generation."""

    def attn(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, max_len: int, scale: float, window: int, softcap: float
    ) -> Tensor:
        keys, values = (t[:, :, :max_len].transpose(1, 2) for t in (k, v))
        return called(q, keys, values, None, max_len if lengths is None else lengths, scale, window, softcap)

    def paged_attn(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        max_len: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        return called(q, k_pages, v_pages, block_table, lengths, scale, window, softcap)

    return attn, paged_attn


attn, paged_attn = _ops(_called)
attn_3, paged_attn_3 = _ops(_called_3)
attn_4, paged_attn_4 = _ops(_called_4)


# --- limits -----------------------------------------------------------------------------------------------------------


def _heads(w: Workload, _: tuple[int, int]) -> str:
    return narrow_heads(w, WIDEST_HEAD)


def _pages(w: Workload, cc: tuple[int, int]) -> str:
    page = w["page"]
    return _heads(w, cc) or (
        "" if page % PAGE == 0 else f"supports pages of a multiple of {PAGE} tokens; these have {page}"
    )


def _heads_4(w: Workload, cc: tuple[int, int]) -> str:
    return narrow_heads(w, WIDEST_HEAD_BY_CUTE.get(cc[0], 128))


def _kernel(op: str, function: str, library: Library, limits: Limits) -> LibraryKernel:
    return LibraryKernel(op, f"flash_attn:{function}", library, backend="FLASH_ATTN", limits=limits, writes_out=False)


KERNELS = (
    _kernel("attn", "attn", FLASH_ATTN, _heads),
    _kernel("paged_attn", "paged_attn", FLASH_ATTN, _pages),
    _kernel("attn", "attn_3", FLASH_ATTN_3, _heads),
    _kernel("paged_attn", "paged_attn_3", FLASH_ATTN_3, _heads),
    _kernel("attn", "attn_4", FLASH_ATTN_4, _heads_4),
    _kernel("paged_attn", "paged_attn_4", FLASH_ATTN_4, _heads_4),
)
