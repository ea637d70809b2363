"""gate_up   y = act(h @ w_gate^T) * (h @ w_up^T), h = rmsnorm(x); act 0: silu, 1: gelu (erf), 2: gelu (tanh)
          x[M,d], norm_weight[d], w_gate, w_up [I,d] -> y[M,I]

bytes     b (M d + d + 2 I d + M I) (b = bytes an element)      FLOPs   4 M d I + 4 M d + 5 M I
roofline  Llama-3.1-8B (I=14336, d=4096), M=1, bf16 on an H200 (4.3 TB/s estimated): 235 MB, 54.6 us
knobs     M <= 8: knobs/gpu/gemv.py, as for gemv.py, with half the rows: a program holds the gate row and the up row of
          each.
          Above: the streaming form of knobs/gpu/gemm.py, with half of `tile_rows` from each matrix.
source    Matching gate and up rows in one program, one read of x, and the product in the epilogue; 1 / rms as in
          norm_qkv.py
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import activate, empty, refuse, row, together
from autosel.triton_kernels.gemm import side
from autosel.triton_kernels.project import LANES, MOST_ROWS, stream, tile_shape
from autosel.triton_kernels.tiles import fitting_stages, norm_rows, normed


@triton.jit
def _few(
    x, norm, w_gate, w_up, y, width, d, eps, offset, stride_x, stride_g, stride_u, stride_y,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for block in tl.range(tl.program_id(0), tl.cdiv(width, BN), tl.num_programs(0)):
        n = block * BN + tl.arange(0, BN)
        inside, at = n < width, n.to(tl.int64)[:, None]
        gates, ups, squares = stream(
            w_gate + at * stride_g, w_up + at * stride_u, inside, x, norm, offset, 0, d, stride_x, M, BN, BK, True,
            True, PDL,
        )  # fmt: skip
        for m in tl.static_range(M):
            rstd = tl.rsqrt(tl.sum(squares[m], 0) / d + eps)
            made = activate(tl.sum(gates[m], 1) * rstd, KIND) * (tl.sum(ups[m], 1) * rstd)
            tl.store(row(y, m, stride_y) + n, made.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _many(
    x, norm, w_gate, w_up, y, M, width, d, eps, offset, stride_x, stride_g, stride_u, stride_y,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, m, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    rows, columns, at_n, at_m = (m < M)[:, None], (n < width)[:, None], n.to(tl.int64), m.to(tl.int64)
    rstd = norm_rows(x, m, rows, d, eps, stride_x, BM, BK)
    left = x + at_m[:, None] * stride_x + k[None, :]
    gate_at, up_at = w_gate + at_n[:, None] * stride_g + k[None, :], w_up + at_n[:, None] * stride_u + k[None, :]
    gates = tl.zeros((BN, BM), tl.float32)
    ups = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, d, BK, num_stages=STAGES):
        deep = k < d - start
        h = normed(left, norm + start + k, rows, deep, rstd, offset).T
        gates = tl.dot(tl.load(gate_at, mask=columns & deep[None, :], other=0.0), h, gates, input_precision="ieee")
        ups = tl.dot(tl.load(up_at, mask=columns & deep[None, :], other=0.0), h, ups, input_precision="ieee")
        left += BK
        gate_at += BK
        up_at += BK
    made = (activate(gates, KIND) * ups).to(y.dtype.element_ty)
    tl.store(y + at_m[None, :] * stride_y + n[:, None], made, mask=columns & (m < M)[None, :])


def gate_up(
    x, norm_weight, w_gate, w_up, eps, offset, activation, y=None, *,
    threads=256, unroll=2, rows_per_warp=1, grid=1 << 30, pdl=False, tile_rows=128, tile_depth=64, stages=3,
    shared=99 << 10,
):  # fmt: skip
    (m, d), width = x.shape, w_gate.shape[0]
    if y is None:
        y = empty((m, width), x)
    together(x, norm_weight, w_gate, w_up, y)
    if norm_weight.shape != (d,) or not w_gate.shape == w_up.shape == (width, d) or y.shape != (m, width):
        refuse("gate_up takes x[M,d], norm_weight[d], w_gate, w_up [I,d], y[M,I]")
    if not x.dtype == norm_weight.dtype == w_gate.dtype == w_up.dtype == y.dtype:
        refuse("gate_up takes one dtype")
    size, strides = x.element_size(), (x.stride(0), w_gate.stride(0), w_up.stride(0), y.stride(0))
    if m <= MOST_ROWS:
        bn, bk = tile_shape(m, size, threads, unroll, rows_per_warp, weights=2)
        _few[(min(grid, triton.cdiv(width, bn)),)](
            x, norm_weight, w_gate, w_up, y, width, d, float(eps), float(offset), *strides, M=m, BN=bn, BK=bk,
            KIND=activation, PDL=pdl, num_warps=threads // LANES, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
        return y
    bm, bn = side(m), tile_rows // 2
    if m > bm:
        refuse(f"gate_up takes up to {bm} rows")
    stages = fitting_stages(stages, (bm + 2 * bn) * tile_depth * size, shared)
    _many[(triton.cdiv(width, bn),)](
        x, norm_weight, w_gate, w_up, y, m, width, d, float(eps), float(offset), *strides, BM=bm, BN=bn, BK=tile_depth,
        KIND=activation, STAGES=stages, num_warps=8 if bm * bn >= 128 * 32 else 4, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return y
