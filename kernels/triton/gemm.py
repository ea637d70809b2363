"""gemm      y[m,n] = sum_k x[m,k] w[n,k] (+ bias[n]) (+ residual[m,n])      x[M,K], w[N,K] -> y[M,N], tensor cores

bytes     b (M K + N K + M N) (b = bytes an element)      FLOPs   2 M N K
roofline  M=16, N=K=4096, bf16 on an H200 (4.3 TB/s estimated): 33.9 MB, 7.9 us; M=4096: 137 GFLOP,
          176 us at 0.78 PFLOP/s
knobs     knobs/gpu/gemm.py. Few rows (`columns` > 0): the weights are the long side of the matrix instruction,
          `tile_rows` x `tile_depth` per stage; the activations are the short side, `columns` rounded up to a power of
          two (swapped operands: no padding to 64 rows). K is cut into `split_k` parts, which the last to arrive adds in
          order. Many rows: tiles of `tile_m` x `tile_n`; neighbours in M share w in L2. `stages` are in flight, or
          fewer if `shared` bytes hold no more.
source    Swapped operands as in DeepGEMM and SGLang's small-M GEMMs; tile order as in Triton's matmul tutorial
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import arrives_last, counters, empty, exactly, partials, refuse, together
from autosel.triton_kernels.tiles import fitting_stages

GROUP = 8  # tiles of M that move along N together
MOST_COLUMNS = 128  # activation rows of a program with swapped operands: 128 x 128 fp32 in the registers of 256 threads


@triton.jit
def _epilogue(sums, m, n, inside, bias, residual, y, stride_r, stride_y):
    """Add bias and residual and store. m, n: index tensors that broadcast to the shape of sums."""
    if bias is not None:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + m * stride_r + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m * stride_y + n, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _gemm(
    x, w, bias, residual, y, part, counter, M, N, K, stride_x, stride_w, stride_r, stride_y,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = GROUP * columns
    first = tl.program_id(0) // band * GROUP
    height = tl.minimum(rows - first, GROUP)
    m = (first + tl.program_id(0) % band % height) * BM + tl.arange(0, BM)
    n = tl.program_id(0) % band // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    depth = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    begin = split * depth
    end = tl.minimum(K, begin + depth)
    at_m, at_n = m.to(tl.int64), n.to(tl.int64)
    left = x + at_m[:, None] * stride_x + (begin + k)[None, :]
    right = w + at_n[:, None] * stride_w + (begin + k)[None, :]
    sums = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for start in tl.range(begin, end, BK, num_stages=STAGES):
        deep = k[None, :] < (K if EVEN else end - start)
        a = tl.load(left, mask=(m < M)[:, None] & deep, other=0.0)
        b = tl.load(right, mask=(n < N)[:, None] & deep, other=0.0)
        if SWAP:
            sums = tl.dot(b, a.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(a, b.T, sums, input_precision="ieee")
        left += BK
        right += BK
    inside = (n < N)[:, None] & (m < M)[None, :] if SWAP else (m < M)[:, None] & (n < N)[None, :]
    row = at_m[None, :] if SWAP else at_m[:, None]
    column = n[:, None] if SWAP else n[None, :]
    if SPLIT == 1:
        _epilogue(sums, row, column, inside, bias, residual, y, stride_r, stride_y)
    else:
        tl.store(part + (split * M + row) * N + column, sums, mask=inside)
        if arrives_last(counter + tl.program_id(0), SPLIT):
            sums = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
            for s in tl.static_range(SPLIT):
                sums += tl.load(part + (s * M + row) * N + column, mask=inside, other=0.0, cache_modifier=".cg")
            _epilogue(sums, row, column, inside, bias, residual, y, stride_r, stride_y)


def gemm(
    x, w, bias, residual, y=None, *, columns=0, tile_rows=128, tile_depth=64, split_k=1, tile_m=128, tile_n=128,
    stages=3, shared=99 << 10,
):  # fmt: skip
    (m, k), n = x.shape, w.shape[0]
    if y is None:
        y = empty((m, n), x)
    together(x, w, bias, residual, y)
    if w.shape != (n, k) or y.shape != (m, n) or not x.dtype == w.dtype == y.dtype:
        refuse("gemm takes x[M,K], w[N,K], y[M,N] of one dtype")
    if bias is not None:
        exactly("bias", bias, (n,), x.dtype)
    if residual is not None:
        exactly("residual", residual, (m, n), x.dtype)
    size = x.element_size()
    bm, bn = side(columns), tile_rows
    if not columns:
        bm, bn = (tile_m, tile_n) if size == 2 else (min(tile_m, 64), min(tile_n, 64))
    bk = tile_depth if columns else 128 // size
    stages = fitting_stages(stages, (bm + bn) * bk * size, shared)
    split = max(1, min(split_k, triton.cdiv(k, bk))) if columns else 1
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    part = partials(x, split * m * n) if split > 1 else y
    counter = counters(x, tiles) if split > 1 else y
    _gemm[(tiles, split)](
        x, w, bias, residual, y, part, counter, m, n, k, x.stride(0), w.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0), BM=bm, BN=bn, BK=bk, STAGES=stages, SPLIT=split,
        SWAP=columns > 0, EVEN=k % bk == 0, GROUP=GROUP, num_warps=8 if bm * bn >= 128 * 64 else 4, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return y


def side(columns):
    """Return the short side of the matrix instruction: a power of two from 16 (8 gains nothing: Triton pads to 16)."""
    return max(16, min(MOST_COLUMNS, triton.next_power_of_2(max(1, columns))))
