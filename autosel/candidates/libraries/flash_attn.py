"""flash-attn 2: attention over a cache, contiguous or paged (signature: 2.8; pages a multiple of 256 tokens)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import Library, LibraryKernel
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

FLASH_ATTN = Library(
    distribution="flash-attn", module="flash_attn", least_version=(2, 6, 0), needs=("flash_attn_with_kvcache",)
)
PAGE = 256
WIDEST_HEAD = 256


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Its operands are [B, length, heads, D]: views of ours."""
    keys, values = (t[:, :, :max_len].transpose(1, 2) for t in (k, v))
    return _called(q, keys, values, None, max_len if lengths is None else lengths, scale, window, softcap)


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
    return _called(q, k_pages, v_pages, block_table, lengths, scale, window, softcap)


def _called(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    lengths: Tensor | int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found,unused-ignore]

    made: Tensor = flash_attn_with_kvcache(
        q.transpose(1, 2),
        k,
        v,
        cache_seqlens=lengths,
        block_table=block_table,
        softmax_scale=scale or None,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=softcap,
    )
    return made.transpose(1, 2)


def _heads(w: Workload, _: tuple[int, int]) -> str:
    if w["D"] > WIDEST_HEAD or w["D"] % 8:
        return f"takes heads up to {WIDEST_HEAD} wide in steps of 8; the workload's are {w['D']}"
    return ""


def _pages(w: Workload, cc: tuple[int, int]) -> str:
    page = w["page"]
    return _heads(w, cc) or (
        "" if page % PAGE == 0 else f"takes pages of a multiple of {PAGE} tokens; these have {page}"
    )


KERNELS = (
    LibraryKernel("attn", "flash_attn:attn", FLASH_ATTN, backend="FLASH_ATTN", limits=_heads, writes_out=False),
    LibraryKernel(
        "paged_attn", "flash_attn:paged_attn", FLASH_ATTN, backend="FLASH_ATTN", limits=_pages, writes_out=False
    ),
)
