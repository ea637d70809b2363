"""gemv      y[m,n] = sum_k x[m,k] w[n,k] (+ bias[n]) (+ residual[m,n])      x[M,K], w[N,K] -> y[M,N], M <= 8

bytes     b (M K + N K + M N) (b = bytes an element)      FLOPs   2 M N K
roofline  M=1, N=K=4096, bf16 on an H200 (4.3 TB/s estimated): 33.6 MB, 7.8 us
knobs     knobs/gpu/gemv.py. A warp owns `rows_per_warp` rows of w and reads 16 bytes per lane, `unroll` times per step:
          the tile of a program is [8 rows_per_warp, 512 unroll / b]. The next tile is loaded before this one is used,
          so two are in flight. `grid` programs share the tiles. The last program to arrive adds the `split_k` parts of
          a row, in fp32 and in a fixed order. `pdl`: the first weights are loaded before the wait for the kernel that
          produces x (programmatic dependent launch, cc >= 9.0).
source    Bytes in flight and the order of loads: msaroufim/megakernels-vs-cuda-graphs, llama/kernels/projection.cu
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import arrives_last, counters, empty, exactly, partials, refuse, row, together
from autosel.triton_kernels.project import LANES, MOST_ROWS, stream, tile_shape


@triton.jit
def _finish(sums, m, n, inside, scale, bias, residual, y, stride_r, stride_y):
    if scale is not None:
        sums *= tl.load(scale + n, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(row(residual, m, stride_r) + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(row(y, m, stride_y) + n, sums.to(y.dtype.element_ty), mask=inside)


# For fp8 weights (gemv_fp8.py), `scale` holds one scale per row of w; otherwise it is None.
@triton.jit
def _gemv(
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


def gemv(
    x, w, bias, residual, y=None, *, threads=256, unroll=2, rows_per_warp=1, split_k=1, grid=1 << 30, pdl=False
):  # fmt: skip
    (m, k), n = x.shape, w.shape[0]
    if y is None:
        y = empty((m, n), x)
    together(x, w, bias, residual, y)
    if m > MOST_ROWS or w.shape != (n, k) or y.shape != (m, n) or not x.dtype == w.dtype == y.dtype:
        refuse(f"gemv takes x[M,K], w[N,K], y[M,N] of one dtype, M at most {MOST_ROWS}")
    if bias is not None:
        exactly("bias", bias, (n,), x.dtype)
    if residual is not None:
        exactly("residual", residual, (m, n), x.dtype)
    tile = tile_shape(m, x.element_size(), threads, unroll, rows_per_warp)
    return launch(x, w, None, bias, residual, y, tile, threads=threads, split_k=split_k, grid=grid, pdl=pdl)


def launch(x, w, scale, bias, residual, y, tile, *, threads, split_k, grid, pdl):
    """Launch the kernel for operands that were already checked; `tile` = [rows of w, depth] of a program."""
    (m, k), n, (bn, bk) = x.shape, w.shape[0], tile
    blocks, split = triton.cdiv(n, bn), max(1, min(split_k, triton.cdiv(k, bk)))
    part = partials(x, split * m * n) if split > 1 else y
    counter = counters(x, blocks) if split > 1 else y
    _gemv[(min(grid, blocks * split),)](
        x, w, scale, bias, residual, y, part, counter, n, k, x.stride(0), w.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0),
        M=m, BN=bn, BK=bk, SPLIT=split, PDL=pdl, num_warps=threads // LANES, launch_pdl=pdl, enable_fp_fusion=True,
    )  # fmt: skip
    return y
