"""Compute the settings that peers' published rules give, for use with autosel's kernels instead of closed forms.

Only the choice of settings is compared, since all run the same kernel. Sources: FlashAttention 3's rule for splits
(hopper/heuristics.h of Dao-AILab/flash-attention); vLLM's unified attention in Triton (128 // Hkv sequences as the
threshold, 16 segments); the matrix product of Triton's tutorials, whose tiles of 128 x 128 and 3 stages many kernels
start from. Libraries with their own kernels have no settings to compare: see benchmarks/cublaslt.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autosel.knobs.gpu.attention import cache_of
from autosel.knobs.gpu.facts import GpuFacts, facts
from autosel.values import Fingerprint, Scalar, Workload

Setting = dict[str, Scalar]

FA_KEYS = 128  # keys of a FlashAttention block, for heads of up to 128 channels
FA_MOST_SPLITS = 128
FA_NEVER_SPLIT = 4  # blocks
FA_ENOUGH = 0.8  # share of busy SMs above which it does not split
FA_WITHIN = 0.85  # share of the best wave efficiency
VLLM_SEGMENTS = 16
TRITON_TILE: Setting = {"tile_rows": 128, "tile_m": 128, "tile_n": 128, "stages": 3, "split_k": 1}


def flash_attention_splits(tiles: int, sms: int, blocks: int, most: int = FA_MOST_SPLITS) -> int:
    """Return FlashAttention 3's number of splits: the fewest with at least 85 % of the best wave efficiency.

    The result is 1 if 80 % of the SMs have a tile, or if there are few keys. `tiles`: sequences x KV heads (x tiles of
    query rows); `blocks`: blocks of keys in the longest sequence.
    """
    if tiles >= FA_ENOUGH * sms:
        return 1
    if blocks <= FA_NEVER_SPLIT:
        return 1
    tried = range(1, min(most, sms, blocks) + 1)
    full = {s: tiles * s / sms / math.ceil(tiles * s / sms) for s in tried}
    best = max(full.values())
    return min(s for s in tried if full[s] >= FA_WITHIN * best)


def vllm_segments(sequences: int, kv_heads: int) -> int:
    """Return vLLM's segments: 16 for at most 128 / Hkv sequences, else 1, for any device and length."""
    return VLLM_SEGMENTS if sequences <= 128 // kv_heads else 1


def of_peers(w: Workload, fp: Fingerprint, closed: Mapping[str, Scalar]) -> dict[str, Setting]:
    """Return peer -> setting for peers with a rule for this workload; other knobs stay at the closed form's values."""
    if fp.kind != "cuda":
        return {}
    if w.op in ("attn", "paged_attn") and "chunk" in closed:
        found = attention_splits(w, facts(fp))
        return {peer: {**closed, "chunk": _chunk(w, s, int(closed["tile"]))} for peer, s in found.items()}
    tiled = {name: value for name, value in TRITON_TILE.items() if name in closed}
    if w.op in ("linear", "lm_head") and {"tile_rows", "tile_m"} & set(tiled):
        return {"triton's tutorial": {**closed, **tiled}}
    return {}


def attention_splits(w: Workload, f: GpuFacts) -> dict[str, int]:
    c = cache_of(w)
    return {
        "flash-attention": flash_attention_splits(c.heads, f.sms, math.ceil(c.length / FA_KEYS)),
        "vllm": vllm_segments(w["B"], w["Hkv"]),
    }


def _chunk(w: Workload, splits: int, tile: int) -> int:
    """Return the keys of a split, in whole tiles."""
    return tile * math.ceil(cache_of(w).length / splits / tile)
