"""norm_qkv  y[m,:] = rmsnorm(x[m,:]) @ w^T, w the query, key and value projections stacked          x[M,d],
          norm_weight[d], w[N,d] -> y[M,N]

bytes     b (M d + d + N d + M N) (b = bytes an element)      FLOPs   2 M N d + 4 M d
roofline  Llama-3.1-8B (N=6144, d=4096), M=1, bf16 on an H200 (4.3 TB/s estimated): 50.3 MB, 11.7 us
knobs     M <= 8: knobs/gpu/gemv.py, as for gemv.py. Above: the streaming form of knobs/gpu/gemm.py, as for gemm.py.
source    1 / rms is a scalar, so up to 8 rows it is applied after the dot product: the sum of squares is computed in
          the same pass. Tensor cores need a normalised and rounded x, so there each program reads its rows a second
          time, from L2; above 64 rows a separate norm is cheaper.
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import empty, refuse, row, together
from autosel.triton_kernels.gemm import side
from autosel.triton_kernels.project import LANES, MOST_ROWS, stream, tile_shape
from autosel.triton_kernels.tiles import fitting_stages, norm_rows, normed


@triton.jit
def _few(
    x, norm, w, y, N, d, eps, offset, stride_x, stride_w, stride_y,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for block in tl.range(tl.program_id(0), tl.cdiv(N, BN), tl.num_programs(0)):
        n = block * BN + tl.arange(0, BN)
        inside = n < N
        at = w + n.to(tl.int64)[:, None] * stride_w
        made = stream(at, at, inside, x, norm, offset, 0, d, stride_x, M, BN, BK, True, False, PDL)
        sums, squares = made[0], made[2]
        for m in tl.static_range(M):
            rstd = tl.rsqrt(tl.sum(squares[m], 0) / d + eps)
            tl.store(row(y, m, stride_y) + n, (tl.sum(sums[m], 1) * rstd).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _many(
    x, norm, w, y, M, N, d, eps, offset, stride_x, stride_w, stride_y,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, m, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    rows, columns, at_n, at_m = (m < M)[:, None], (n < N)[:, None], n.to(tl.int64), m.to(tl.int64)
    rstd = norm_rows(x, m, rows, d, eps, stride_x, BM, BK)
    left, right = x + at_m[:, None] * stride_x + k[None, :], w + at_n[:, None] * stride_w + k[None, :]
    sums = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, d, BK, num_stages=STAGES):
        deep = k < d - start
        h = normed(left, norm + start + k, rows, deep, rstd, offset)
        tile = tl.load(right, mask=columns & deep[None, :], other=0.0)
        sums = tl.dot(tile, h.T, sums, input_precision="ieee")
        left += BK
        right += BK
    tl.store(y + at_m[None, :] * stride_y + n[:, None], sums.to(y.dtype.element_ty), mask=columns & (m < M)[None, :])


def norm_qkv(
    x, norm_weight, w, eps, offset, y=None, *,
    threads=256, unroll=2, rows_per_warp=1, grid=1 << 30, pdl=False, tile_rows=128, tile_depth=64, stages=3,
    shared=99 << 10,
):  # fmt: skip
    (m, d), n = x.shape, w.shape[0]
    if y is None:
        y = empty((m, n), x)
    together(x, norm_weight, w, y)
    if norm_weight.shape != (d,) or w.shape != (n, d) or y.shape != (m, n):
        refuse("norm_qkv takes x[M,d], norm_weight[d], w[N,d], y[M,N]")
    if not x.dtype == norm_weight.dtype == w.dtype == y.dtype:
        refuse("norm_qkv takes one dtype")
    size, strides = x.element_size(), (x.stride(0), w.stride(0), y.stride(0))
    if m <= MOST_ROWS:
        bn, bk = tile_shape(m, size, threads, unroll, rows_per_warp)
        _few[(min(grid, triton.cdiv(n, bn)),)](
            x, norm_weight, w, y, n, d, float(eps), float(offset), *strides, M=m, BN=bn, BK=bk, PDL=pdl,
            num_warps=threads // LANES, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
        return y
    bm, bn = side(m), tile_rows
    if m > bm:
        refuse(f"norm_qkv takes up to {bm} rows")
    stages = fitting_stages(stages, (bm + bn) * tile_depth * size, shared)
    _many[(triton.cdiv(n, bn),)](
        x, norm_weight, w, y, m, n, d, float(eps), float(offset), *strides, BM=bm, BN=bn, BK=tile_depth, STAGES=stages,
        num_warps=8 if bm * bn >= 128 * 64 else 4, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return y
