"""kv_append   cache[b, h, positions[b] + s, :] = new[b, h, s, :] for k and v, bit for bit; with a block table the slot
            is [block_table[b, p // page], p % page, h]          k, v [B,Hkv,S,D]; caches [B,Hkv,Lmax,D] or
            [P,page,Hkv,D]

bytes     4 B Hkv S D b + 4 B (b = bytes an element)      FLOPs   0
roofline  Llama-3.1-8B, B=1, bf16 on an H200 (4.3 TB/s estimated): 8 KB, 2 ns; alone the launch is all it costs
          (2-3 us), with rope's kernel nothing
knobs     threads (knobs/gpu/rows.py): one warp per token and KV head
source    - Nothing is written for a position beyond the cache or a page that does not exist.
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.common import exactly, refuse, together


@triton.jit
def _copy(source, target, d, inside):
    tl.store(target[:, None] + d[None, :], tl.load(source[:, None] + d[None, :], mask=inside), mask=inside)


@triton.jit(do_not_specialize=["tokens", "S", "room"], do_not_specialize_on_alignment=["positions"])
def _kv_append(
    k, v, positions, table, k_cache, v_cache, tokens, Hkv, S, room, stride_table,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_cb, stride_ch, stride_ct, stride_wb, stride_wh, stride_wt,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, WIDTH)
    b, h, s = (token // (S * Hkv)).to(tl.int64), (token // S % Hkv).to(tl.int64), (token % S).to(tl.int64)
    position = tl.load(positions + b, mask=token < tokens, other=room) + token % S
    valid = (token < tokens) & (position >= 0) & (position < room)
    at, slot = b, position
    if PAGE > 0:
        at = tl.load(table + b * stride_table + position // PAGE, mask=valid, other=-1).to(tl.int64)
        slot = position % PAGE
        valid &= at >= 0
    inside = valid[:, None] & (d < D)[None, :]
    slot = slot.to(tl.int64)
    keys, values = k + b * stride_kb + h * stride_kh + s * stride_ks, v + b * stride_vb + h * stride_vh + s * stride_vs
    _copy(keys, k_cache + at * stride_cb + h * stride_ch + slot * stride_ct, d, inside)
    _copy(values, v_cache + at * stride_wb + h * stride_wh + slot * stride_wt, d, inside)


def kv_append(k, v, positions, block_table, k_cache, v_cache, *, threads=256):
    together(k, v, positions, block_table, k_cache, v_cache)
    batch, hkv, s, d = k.shape
    exactly("positions", positions, (batch,), torch.int32)
    if v.shape != k.shape or k_cache.shape != v_cache.shape:
        refuse("kv_append takes k, v [B,Hkv,S,D] and two caches of one shape")
    if not k.dtype == v.dtype == k_cache.dtype == v_cache.dtype or k_cache.shape[3] != d:
        refuse("kv_append takes one dtype and width")
    if block_table is None:
        page, room, stride_table, order = 0, k_cache.shape[2], 0, (0, 1, 2)
        fits = k_cache.shape[:2] == (batch, hkv)
    else:
        exactly("block_table", block_table, (batch, *block_table.shape[-1:]), torch.int32)
        page, stride_table, order = k_cache.shape[1], block_table.stride(0), (0, 2, 1)
        room = block_table.shape[1] * page
        fits = k_cache.shape[2] == hkv
    if not fits:
        refuse("kv_append: the caches do not fit the new keys and values")
    tokens, warps = batch * hkv * s, max(1, threads // 32)
    _kv_append[(triton.cdiv(tokens, warps),)](
        k, v, positions, block_table, k_cache, v_cache, tokens, hkv, s, room, stride_table, *k.stride()[:3],
        *v.stride()[:3], *(k_cache.stride(i) for i in order), *(v_cache.stride(i) for i in order), PAGE=page, D=d,
        WIDTH=triton.next_power_of_2(d), TOKENS=warps, num_warps=warps,
    )  # fmt: skip
    return k_cache, v_cache
