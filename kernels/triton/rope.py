"""rope      (a, b) -> (a cos - b sin, b cos + a sin), angle = position * inv_freq          q[M,Hq,D], k[M,Hkv,D],
          positions[M], inv_freq[R/2] -> q, k rotated; style 0: pairs (i, i + R/2), style 1: pairs (2i, 2i + 1);
          elements from R on pass through

bytes     2 M (Hq + Hkv) D b (b = bytes an element)      FLOPs   3 M (Hq + Hkv) R
roofline  Llama-3.1-8B, M=1, bf16 on an H200 (4.3 TB/s estimated): 20 KB, 5 ns; the launch is all it costs (2-3 us)
knobs     threads (knobs/gpu/rows.py): one warp per head
source    The angle is a float64 product, reduced to [-pi, pi] in float64: fp32 angles are wrong at long contexts, and
          64 products per program cost nothing even if float64 runs at 1/64 of the rate. Outputs may be the inputs.
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.common import empty, exactly, refuse, together, warps


@triton.jit
def _turn(
    x, out, head, stride_xh, stride_oh, cos, sin, inside, pair, HALF: tl.constexpr, STYLE: tl.constexpr,
    D: tl.constexpr, REST: tl.constexpr, heads,
):  # fmt: skip
    one = pair * 2 if STYLE else pair
    two = pair * 2 + 1 if STYLE else pair + HALF
    valid = (head < heads)[:, None] & inside[None, :]
    at = head.to(tl.int64)[:, None]
    source, target = x + at * stride_xh, out + at * stride_oh
    a = tl.load(source + one[None, :], mask=valid, other=0.0).to(tl.float32)
    b = tl.load(source + two[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(target + one[None, :], (a * cos - b * sin).to(out.dtype.element_ty), mask=valid)
    tl.store(target + two[None, :], (b * cos + a * sin).to(out.dtype.element_ty), mask=valid)
    if D > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)
        beyond = (head < heads)[:, None] & (rest < D)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=beyond, other=0.0), mask=beyond)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope(
    q, k, positions, inv_freq, q_out, k_out, Hq, Hkv, q_blocks,
    stride_qm, stride_qh, stride_km, stride_kh, stride_rm, stride_rh, stride_tm, stride_th,
    HALF: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    STYLE: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    inside = pair < HALF
    frequency = tl.load(inv_freq + pair, mask=inside, other=0.0).to(tl.float64)
    turns = tl.load(positions + row).to(tl.float64) * frequency * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    head = tl.arange(0, HEADS)
    if block < q_blocks:
        head += block * HEADS
        _turn(
            q + row * stride_qm, q_out + row * stride_rm, head, stride_qh, stride_rh, cos, sin, inside, pair, HALF,
            STYLE, D, REST, Hq,
        )  # fmt: skip
    else:
        head += (block - q_blocks) * HEADS
        _turn(
            k + row * stride_km, k_out + row * stride_tm, head, stride_kh, stride_th, cos, sin, inside, pair, HALF,
            STYLE, D, REST, Hkv,
        )  # fmt: skip


def rope(q, k, positions, inv_freq, style, q_out=None, k_out=None, *, threads=256):
    if q_out is None:
        q_out, k_out = empty(q.shape, q), empty(k.shape, k)
    together(q, k, positions, inv_freq, q_out, k_out)
    (m, hq, d), hkv, half = q.shape, k.shape[1], inv_freq.numel()
    if k.shape != (m, hkv, d) or q_out.shape != q.shape or k_out.shape != k.shape:
        refuse("rope takes q[M,Hq,D], k[M,Hkv,D] and outputs like q and k")
    exactly("positions", positions, (m,), torch.int64)
    exactly("inv_freq", inv_freq, (half,), torch.float32)
    if 2 * half > d or not q.dtype == k.dtype == q_out.dtype == k_out.dtype:
        refuse("rope takes one dtype, and rotates at most D elements")
    heads = triton.next_power_of_2(max(1, threads // 32))
    q_blocks = triton.cdiv(hq, heads)
    _rope[(m, q_blocks + triton.cdiv(hkv, heads))](
        q, k, positions, inv_freq, q_out, k_out, hq, hkv, q_blocks, *q.stride()[:2], *k.stride()[:2],
        *q_out.stride()[:2], *k_out.stride()[:2], HALF=half, PAIRS=triton.next_power_of_2(half), D=d,
        REST=triton.next_power_of_2(max(1, d - 2 * half)), HEADS=heads, STYLE=bool(style),
        num_warps=warps(threads), enable_fp_fusion=True,
    )  # fmt: skip
    return q_out, k_out
