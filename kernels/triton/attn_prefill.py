"""prefill_attn   causal attention of a prompt to itself: query i sees keys 0..i, the last `window` of them
               q[B,Hq,S,D], k/v[B,Hkv,S,D] -> o[B,Hq,S,D]

bytes     2 b B (Hq + Hkv) S D (b = bytes an element)      FLOPs   2 B Hq D S (S + 1)
roofline  Llama-3.1-8B, B=1, S=2048, bf16 on an H200 (0.78 PFLOP/s estimated): 34 GFLOP, 44 us; 42 MB, 10 us
knobs     knobs/gpu/attention.py: `tile_q` query rows per program, `tile_k` keys per step, `stages` in flight. There are
          fewer rows if registers hold no more (`wgmma`: operands stay in shared memory), and shorter tiles if `shared`
          does not.
source    The loop of FlashAttention-2: first the tiles below the diagonal, without a mask, then those on it. The
          longest rows start first.
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.attention import LEAST_ROWS, attend, fitting_tile, normalised
from autosel.triton_kernels.common import empty, refuse, row, together


@triton.jit
def _sweep(
    query, keys, values, begin, end, S, window, stride_kt, stride_vt, position, peak, total, acc, scale, softcap, wide,
    t, TILE: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys, values = row(keys, begin, stride_kt), row(values, begin, stride_vt)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        j = start + t
        if MASKED:
            inside = j < S
            key = tl.load(keys, mask=wide[:, None] & inside[None, :], other=0.0)
            value = tl.load(values, mask=inside[:, None] & wide[None, :], other=0.0)
            seen = j[None, :] <= position[:, None]
            if WINDOWED:
                seen &= j[None, :] > position[:, None] - window
        else:
            key = tl.load(keys, mask=wide[:, None], other=0.0)
            value = tl.load(values, mask=wide[None, :], other=0.0)
            seen = tl.full((position.shape[0], TILE), True, tl.int1)
        peak, total, acc = attend(query, key, value, seen, peak, total, acc, scale, softcap, CAPPED)
        keys, values = row(keys, TILE, stride_kt), row(values, TILE, stride_vt)
    return peak, total, acc


@triton.jit(do_not_specialize=["S"])
def _attn_prefill(
    q, k, v, o, S, Hq, G, scale, softcap, window,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_os,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    first = block * ROWS
    position, d, t = first + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    wide = d < D
    valid = (position < S)[:, None] & wide[None, :]
    at, token = position.to(tl.int64)[:, None], t.to(tl.int64)
    query = tl.load(q + b * stride_qb + h * stride_qh + at * stride_qs + d[None, :], mask=valid, other=0.0)
    keys = k + b * stride_kb + h // G * stride_kh + token[None, :] * stride_kt + d[:, None]
    values = v + b * stride_vb + h // G * stride_vh + token[:, None] * stride_vt + d[None, :]
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    begin = first * 0
    if WINDOWED:
        begin = tl.maximum(0, first - window + 1) // TILE * TILE
    else:
        whole = first // TILE * TILE  # before this key, every query of the block sees every key
        peak, total, acc = _sweep(
            query, keys, values, begin, whole, S, window, stride_kt, stride_vt, position, peak, total, acc, scale,
            softcap, wide, t, TILE, STAGES, WINDOWED, CAPPED, False,
        )  # fmt: skip
        begin = whole
    peak, total, acc = _sweep(
        query, keys, values, begin, tl.minimum(S, first + ROWS), S, window, stride_kt, stride_vt, position, peak, total,
        acc, scale, softcap, wide, t, TILE, STAGES, WINDOWED, CAPPED, True,
    )  # fmt: skip
    outputs = o + b * stride_ob + h * stride_oh + at * stride_os + d[None, :]
    tl.store(outputs, normalised(acc, total).to(o.dtype.element_ty), mask=valid)


def attn_prefill(
    q, k, v, scale, window, softcap, o=None, *, tile_q=64, tile_k=32, stages=2, shared=99 << 10, wgmma=False
):
    (batch, hq, s, depth), hkv = q.shape, k.shape[1]
    if o is None:
        o = empty(q.shape, q)
    together(q, k, v, o)
    if k.shape != v.shape or k.shape != (batch, hkv, s, depth) or hq % hkv or o.shape != q.shape:
        refuse("prefill_attn takes q, o [B,Hq,S,D], k/v[B,Hkv,S,D], Hq a multiple of Hkv")
    if not q.dtype == k.dtype == v.dtype == o.dtype:
        refuse("prefill_attn takes one dtype")
    size, width = q.element_size(), triton.next_power_of_2(max(depth, 16))
    rows, longest, warps = tile_shape(tile_q, tile_k, width, size, wgmma)
    tile, stages = fitting_tile(longest, stages, width, size, shared - rows * width * size)
    _attn_prefill[(triton.cdiv(s, rows), batch * hq)](
        q, k, v, o, s, hq, hq // hkv, scale or depth**-0.5, float(softcap), window, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *o.stride()[:3], D=depth, WIDTH=width, ROWS=rows, TILE=tile, STAGES=stages,
        WINDOWED=0 < window < s, CAPPED=softcap > 0, num_warps=warps, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return o


def tile_shape(tile_q, tile_k, width, size, wgmma):
    """Return (query rows, keys, warps) whose outputs and scores fit the registers, found by compiling for each target.

    The limit is 72 values per thread with 256 threads, or 128 with wgmma, whose operands stay in shared memory. fp32
    operands are multiplied from registers, 16 rows at a time.
    """
    if size > 2:
        return LEAST_ROWS, min(tile_k, 32), 4
    tile = min(tile_k, 128 if wgmma and width <= 128 else 64)
    rows, most = tile_q, (128 if wgmma else 72) * 256
    while rows > LEAST_ROWS and rows * (width + tile) > most:
        rows //= 2
    return rows, tile, 8
