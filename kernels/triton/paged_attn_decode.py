"""paged_attn   attn over a cache in pages: key j of row b lies in page block_table[b, j // page], slot j % page
             q[B,Hq,S,D], k/v[P,page,Hkv,D], block_table[B,n], lengths[B] -> o[B,Hq,S,D]; see attn_decode.py

bytes     b (2 Hkv D sum of lengths + 2 B Hq S D) + 4 B pages (b = bytes an element)
FLOPs     4 Hq D S sum of lengths
roofline  Llama-3.1-8B, B=1, L=8192, bf16 on an H200 (4.3 TB/s estimated): 33.6 MB, 7.8 us
knobs     as in attn_decode.py
source    As attn_decode.py. The table's entries for a tile are loaded one stage before their keys. The page size is a
          compile-time constant, so that j // page is a shift. Entries beyond a row's length are never read, nor is a
          page if its entry is below 0.
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.attention import attend, deliver, fitting_tile, merge, rows_block, unspilled_tile
from autosel.triton_kernels.common import counters, empty, exactly, partials, refuse, together


@triton.jit(do_not_specialize=["max_len", "chunk", "splits"], do_not_specialize_on_alignment=["lengths"])
def _paged_attn_decode(
    q, k, v, table, lengths, o, part, counter, max_len, chunk, splits, scale, softcap, window, Hkv, G, S,
    stride_qb, stride_qh, stride_qs, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_tb,
    stride_ob, stride_oh, stride_os,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, ARRIVAL: tl.constexpr,
):  # fmt: skip
    split, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (head // Hkv).to(tl.int64), (head % Hkv).to(tl.int64)
    length = tl.minimum(tl.load(lengths + b), max_len)
    begin = split * chunk
    if WINDOWED:
        begin += tl.maximum(0, length - S - window + 1)
    end = tl.minimum(begin + chunk, length)
    r, d, t = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    valid, wide = r < G * S, d < D
    at, s = h * G + r // S, (r % S).to(tl.int64)
    position = length - S + r % S
    queries = q + b * stride_qb + at[:, None] * stride_qh + s[:, None] * stride_qs + d[None, :]
    query = tl.load(queries, mask=valid[:, None] & wide[None, :], other=0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    keys, values, entries = k + h * stride_kh, v + h * stride_vh, table + b * stride_tb
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        j = start + t
        page = tl.load(entries + j // PAGE, mask=j < end, other=-1).to(tl.int64)
        inside, slot = (j < end) & (page >= 0), (j % PAGE).to(tl.int64)
        at_key, at_value = page * stride_kp + slot * stride_kt, page * stride_vp + slot * stride_vt
        key = tl.load(keys + at_key[None, :] + d[:, None], mask=wide[:, None] & inside[None, :], other=0.0)
        value = tl.load(values + at_value[:, None] + d[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
        seen = inside[None, :] & (j[None, :] <= position[:, None])
        if WINDOWED:
            seen &= j[None, :] > position[:, None] - window
        peak, total, acc = attend(query, key, value, seen, peak, total, acc, scale, softcap, CAPPED)
    outputs = o + b * stride_ob + at[:, None] * stride_oh + s[:, None] * stride_os + d[None, :]
    counter += head * tl.num_programs(1) + block
    deliver(
        outputs, valid[:, None] & wide[None, :], part, counter, head * G * S + r, tl.num_programs(2) * G * S, splits,
        split, peak, total, acc, valid, d, D, SPLIT, ARRIVAL,
    )  # fmt: skip


def paged_attn_decode(
    q, k, v, block_table, lengths, max_len, scale, window, softcap, o=None, *,
    tile=32, stages=2, warps=4, chunk=256, shared=99 << 10, arrival=True,
):  # fmt: skip
    (batch, hq, s, depth), (_, page, hkv, _) = q.shape, k.shape
    if o is None:
        o = empty(q.shape, q)
    together(q, k, v, block_table, lengths, o)
    if k.shape != v.shape or k.shape[3] != depth or hq % hkv or o.shape != q.shape:
        refuse("paged_attn takes q[B,Hq,S,D], k/v[P,page,Hkv,D], o[B,Hq,S,D], Hq a multiple of Hkv")
    exactly("lengths", lengths, (batch,), torch.int32)
    exactly("block_table", block_table, (batch, *block_table.shape[-1:]), torch.int32)
    if not q.dtype == k.dtype == v.dtype == o.dtype or not 0 < max_len <= block_table.shape[1] * page:
        refuse(f"paged_attn takes one dtype and max_len from 1 to {block_table.shape[1] * page}")
    group, width = hq // hkv, triton.next_power_of_2(max(depth, 16))
    rows, warps = rows_block(group * s, width), 8 if width > 256 else warps
    tile = unspilled_tile(tile, rows, width, 32 * warps)
    tile, stages = fitting_tile(tile, stages, width, q.element_size(), shared)
    span = min(max_len, window + s - 1) if window else max_len
    blocks = triton.cdiv(group * s, rows)
    chunk *= blocks  # many query rows fill the chip without splits, and each split stores an output for each of them
    splits = triton.cdiv(span, chunk)
    total_rows = batch * hq * s
    part = partials(q, total_rows * splits * (depth + 2)) if splits > 1 else o
    counter = counters(q, batch * hkv * blocks) if splits > 1 and arrival else o
    _paged_attn_decode[(splits, blocks, batch * hkv)](
        q, k, v, block_table, lengths, o, part, counter, max_len, chunk, splits, scale or depth**-0.5, float(softcap),
        window, hkv, group, s, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], block_table.stride(0),
        *o.stride()[:3], PAGE=page, D=depth, WIDTH=width, ROWS=rows, TILE=tile, STAGES=stages, WINDOWED=window > 0,
        CAPPED=softcap > 0, SPLIT=splits > 1, ARRIVAL=arrival, num_warps=warps,
        num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1 and not arrival:
        merge[(total_rows,)](
            part, o, splits, total_rows, group, s, hkv, *o.stride()[:3], D=depth, WIDTH=width, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return o
