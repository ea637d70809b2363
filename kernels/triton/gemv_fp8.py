"""gemv_fp8  y[m,n] = scale[n] sum_k x[m,k] w[n,k] (+ bias[n]) (+ residual[m,n])
          x[M,K], w[N,K] e4m3, scale[N] fp32 -> y[M,N], M <= 8

bytes     N K + 4 N + b (M K + M N) (b = bytes an element of x)      FLOPs   2 M N K
roofline  M=1, N=K=4096, on an H200 (4.3 TB/s estimated): 16.8 MB, 3.9 us
knobs     knobs/gpu/gemv.py, as for gemv. A lane loads 16 weights at once; 8 for more than four rows of x, 4 for more
          than six, because each weight has one accumulator per row.
source    gemv.py with another epilogue. Compute capability 8.9 and later convert e4m3 with one instruction; Triton
          cannot convert it on older devices.
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.common import arrives_last, counters, empty, exactly, partials, refuse, row, together
from autosel.triton_kernels.project import LANES, MOST_ROWS, stream, tile_shape

WIDE_ROWS, NARROW_ROWS = 4, 6  # most rows of x for which a lane holds 16 weights, and 8


def weight_bytes(m):
    """Return how many bytes of a lane's 16 a weight counts for: each weight has one accumulator per row of x.

    With eight rows, eight weights per lane spill on sm_100.
    """
    return 1 if m <= WIDE_ROWS else 2 if m <= NARROW_ROWS else 4


@triton.jit
def _finish(sums, m, n, inside, scale, bias, residual, y, stride_r, stride_y):
    sums *= tl.load(scale + n, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(row(residual, m, stride_r) + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(row(y, m, stride_y) + n, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gemv_fp8(
    x, w, scale, bias, residual, y, part, counter, N, K, stride_x, stride_w, stride_r, stride_y,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(N, BN)
    depth = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    for item in tl.range(tl.program_id(0), blocks * SPLIT, tl.num_programs(0)):
        n, split = (item % blocks) * BN + tl.arange(0, BN), item // blocks
        inside = n < N
        begin = split * depth
        end = tl.minimum(K, begin + depth)
        at = w + n.to(tl.int64)[:, None] * stride_w
        sums = stream(at, at, inside, x, x, 0.0, begin, end, stride_x, M, BN, BK, False, False, PDL)[0]
        for m in tl.static_range(M):
            if SPLIT == 1:
                _finish(tl.sum(sums[m], 1), m, n, inside, scale, bias, residual, y, stride_r, stride_y)
            else:
                tl.store(part + (split * M + m) * N + n, tl.sum(sums[m], 1), mask=inside)
        if SPLIT > 1:
            if arrives_last(counter + item % blocks, SPLIT):
                for m in tl.static_range(M):
                    whole = tl.zeros((BN,), tl.float32)
                    for s in tl.static_range(SPLIT):
                        whole += tl.load(part + (s * M + m) * N + n, mask=inside, other=0.0, cache_modifier=".cg")
                    _finish(whole, m, n, inside, scale, bias, residual, y, stride_r, stride_y)


def gemv_fp8(
    x, w, scale, bias, residual, y=None, *, threads=256, unroll=2, rows_per_warp=1, split_k=1, grid=1 << 30, pdl=False
):  # fmt: skip
    (m, k), n = x.shape, w.shape[0]
    if y is None:
        y = empty((m, n), x)
    together(x, w, scale, bias, residual, y)
    if m > MOST_ROWS or w.shape != (n, k) or y.shape != (m, n) or x.dtype != y.dtype or w.dtype != torch.float8_e4m3fn:
        refuse(f"gemv_fp8 takes x[M,K], w[N,K] in e4m3, y[M,N] in x's dtype, M at most {MOST_ROWS}")
    exactly("scale", scale, (n,), torch.float32)
    if bias is not None:
        exactly("bias", bias, (n,), x.dtype)
    if residual is not None:
        exactly("residual", residual, (m, n), x.dtype)
    bn, bk = tile_shape(
        m, weight_bytes(m), threads, unroll if m <= WIDE_ROWS else 1, 1 if m > NARROW_ROWS else rows_per_warp
    )
    blocks, split = triton.cdiv(n, bn), max(1, min(split_k, triton.cdiv(k, bk)))
    part = partials(x, split * m * n) if split > 1 else y
    counter = counters(x, blocks) if split > 1 else y
    _gemv_fp8[(min(grid, blocks * split),)](
        x, w, scale, bias, residual, y, part, counter, n, k, x.stride(0), w.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0),
        M=m, BN=bn, BK=bk, SPLIT=split, PDL=pdl, num_warps=threads // LANES, launch_pdl=pdl, enable_fp_fusion=True,
    )  # fmt: skip
    return y
