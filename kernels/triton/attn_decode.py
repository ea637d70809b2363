"""attn      o[b,h,s,:] = sum_j p_j v[b,h',j,:], p = softmax_j(score_j), score = cap(scale q . k_j), h' = h / G
          q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], lengths[B] or None, max_len -> o[B,Hq,S,D]; query s sits at position
          length - S + s and sees the keys up to its own, the last `window` of them

bytes     b (2 Hkv D sum of lengths + 2 B Hq S D) (b = bytes an element)      FLOPs   4 Hq D S sum of lengths
roofline  Llama-3.1-8B, B=1, L=8192, bf16 on an H200 (4.3 TB/s estimated): 33.6 MB, 7.8 us
knobs     knobs/gpu/attention.py: `tile` keys per step, `stages` of them in flight, `chunk` keys per split, 4 `warps`.
          The chunks of a split are as many as the programs that the query rows need.
          `shared`: bytes that a CTA may use; a head wider than the knobs were derived for gets a shorter tile.
          `arrival`: the last split of a head to finish adds them all; otherwise a second kernel does, one launch later.
source    Split-KV is from FlashDecoding. All G S query rows of a KV head are in one program, so the cache is read once.
          tl.dot pads the rows to 16: tensor cores are idle here anyway. Merge on arrival: FlashInfer, csrc/xqa/mha.cu.
          Weights are rounded to the dtype before the product with V; scores are not.
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.attention import attend, deliver, fitting_tile, merge, rows_block, unspilled_tile
from autosel.triton_kernels.common import counters, empty, exactly, partials, refuse, row, together


# For an fp8 cache (attn_decode_fp8.py), `k_scale` and `v_scale` hold one scale per KV head; otherwise they are None.
@triton.jit(
    do_not_specialize=["max_len", "chunk", "splits"],
    do_not_specialize_on_alignment=["lengths", "k_scale", "v_scale"],
)
def _attn_decode(
    q, k, v, k_scale, v_scale, lengths, o, part, counter, max_len, chunk, splits, scale, softcap, window, Hkv, G, S,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_os,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, ARRIVAL: tl.constexpr,
):  # fmt: skip
    split, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (head // Hkv).to(tl.int64), (head % Hkv).to(tl.int64)
    length = max_len
    if lengths is not None:
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
    if k_scale is not None:
        scale *= tl.load(k_scale + h)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    first = begin.to(tl.int64) + t
    keys = k + b * stride_kb + h * stride_kh + first[None, :] * stride_kt + d[:, None]
    values = v + b * stride_vb + h * stride_vh + first[:, None] * stride_vt + d[None, :]
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        j = start + t
        inside = j < end
        key = tl.load(keys, mask=wide[:, None] & inside[None, :], other=0.0).to(query.dtype)
        value = tl.load(values, mask=inside[:, None] & wide[None, :], other=0.0).to(query.dtype)
        seen = inside[None, :] & (j[None, :] <= position[:, None])
        if WINDOWED:
            seen &= j[None, :] > position[:, None] - window
        peak, total, acc = attend(query, key, value, seen, peak, total, acc, scale, softcap, CAPPED)
        keys, values = row(keys, TILE, stride_kt), row(values, TILE, stride_vt)
    if v_scale is not None:
        acc *= tl.load(v_scale + h)
    outputs = o + b * stride_ob + at[:, None] * stride_oh + s[:, None] * stride_os + d[None, :]
    counter += head * tl.num_programs(1) + block
    deliver(
        outputs, valid[:, None] & wide[None, :], part, counter, head * G * S + r, tl.num_programs(2) * G * S, splits,
        split, peak, total, acc, valid, d, D, SPLIT, ARRIVAL,
    )  # fmt: skip


def attn_decode(
    q, k, v, lengths, max_len, scale, window, softcap, o=None, *,
    tile=32, stages=2, warps=4, chunk=256, shared=99 << 10, arrival=True,
):  # fmt: skip
    (batch, hq, _, depth), hkv = q.shape, k.shape[1]
    if o is None:
        o = empty(q.shape, q)
    together(q, k, v, lengths, o)
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != depth or hq % hkv or o.shape != q.shape:
        refuse("attn takes q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], o[B,Hq,S,D], Hq a multiple of Hkv")
    if not q.dtype == k.dtype == v.dtype == o.dtype or not 0 < max_len <= k.shape[2]:
        refuse(f"attn takes one dtype and max_len from 1 to {k.shape[2]}")
    if lengths is not None:
        exactly("lengths", lengths, (batch,), torch.int32)
    knobs = {"tile": tile, "stages": stages, "warps": warps, "chunk": chunk, "shared": shared, "arrival": arrival}
    return launch(q, k, v, None, None, lengths, max_len, scale, window, softcap, o, **knobs)


def launch(
    q, k, v, k_scale, v_scale, lengths, max_len, scale, window, softcap, o, *,
    tile, stages, warps, chunk, shared, arrival,
):  # fmt: skip
    """Launch the kernels for operands that were already checked."""
    (batch, hq, s, depth), hkv = q.shape, k.shape[1]
    group, width = hq // hkv, triton.next_power_of_2(max(depth, 16))
    converted = k.dtype != q.dtype
    # A converted operand passes through registers (four warps of a tile of 128 keys spill on sm_100) and occupies
    # shared memory twice.
    rows, warps = rows_block(group * s, width), 8 if width > 256 or converted else warps
    tile = unspilled_tile(tile, rows, width, 32 * warps)
    size = q.element_size() + (k.element_size() if converted else 0)
    tile, stages = fitting_tile(tile, stages, width, size, shared)
    span = min(max_len, window + s - 1) if window else max_len
    blocks = triton.cdiv(group * s, rows)
    chunk *= blocks  # many query rows fill the chip without splits, and each split stores an output for each of them
    splits = triton.cdiv(span, chunk)
    total_rows = batch * hq * s
    part = partials(q, total_rows * splits * (depth + 2)) if splits > 1 else o
    counter = counters(q, batch * hkv * blocks) if splits > 1 and arrival else o
    _attn_decode[(splits, blocks, batch * hkv)](
        q, k, v, k_scale, v_scale, lengths, o, part, counter, max_len, chunk, splits, scale or depth**-0.5,
        float(softcap), window, hkv, group, s, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
        D=depth, WIDTH=width, ROWS=rows, TILE=tile, STAGES=stages, WINDOWED=window > 0, CAPPED=softcap > 0,
        SPLIT=splits > 1, ARRIVAL=arrival, num_warps=warps, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1 and not arrival:
        merge[(total_rows,)](
            part, o, splits, total_rows, group, s, hkv, *o.stride()[:3], D=depth, WIDTH=width, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return o
