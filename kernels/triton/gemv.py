"""gemv      y[m,n] = sum_k x[m,k] w[n,k] (+ bias[n]) (+ residual[m,n])      x[M,K], w[N,K] -> y[M,N], M <= 8

bytes     b (M K + N K + M N) (b = bytes an element)      FLOPs   2 M N K
roofline  M=1, N=K=4096, bf16 on an H200 (4.3 TB/s estimated): 33.6 MB, 7.8 us
knobs     knobs/gpu/gemv.py. A warp owns `rows_per_warp` rows of w and reads 16 bytes a lane, `unroll` of them a step:
          the tile of a program is [8 rows_per_warp, 512 unroll / b]. The next tile is loaded before this one is used,
          so two are under way. `grid` programs walk the tiles; `split_k` parts of a row are added by whoever arrives
          last, in fp32 and in a fixed order. `pdl`: the first weights are loaded before the wait for the kernel that
          makes x (programmatic dependent launch, cc >= 9.0).
source    bytes in flight and the order of loads: msaroufim/megakernels-vs-cuda-graphs, llama/kernels/projection.cu.
          x is read through a tile of pointers as wide as w's, so that its values lie in the registers that need them and
          no step crosses shared memory; M accumulators instead of a dimension, for the same reason.
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import arrives_last, counters, empty, partials, refuse, together

MOST_ROWS = 8
VECTOR_BYTES, LANES = 16, 32


@triton.jit
def _weights(at, k, inside, K):
    return tl.load(at + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _add(acc, tile, x, k, K, BN: tl.constexpr):
    spread = k[None, :] + tl.zeros((BN, 1), tl.int32)
    return acc + tile * tl.load(x + spread, mask=spread < K, other=0.0).to(tl.float32)


@triton.jit
def _finish(sums, m, n, inside, bias, residual, y, stride_r, stride_y):
    if bias is not None:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + m * stride_r + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m * stride_y + n, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _end(
    acc, m, n, inside, part, N, M: tl.constexpr, split, bias, residual, y, stride_r, stride_y, SPLIT: tl.constexpr
):
    """Either the result of row m, or this part's share of it."""
    sums = tl.sum(acc, 1)
    if SPLIT == 1:
        _finish(sums, m, n, inside, bias, residual, y, stride_r, stride_y)
    else:
        tl.store(part + (split * M + m) * N + n, sums, mask=inside)


@triton.jit
def _gemv(
    x, w, bias, residual, y, part, counter, N, K, stride_x, stride_w, stride_r, stride_y,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(N, BN)
    depth = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    lane = tl.arange(0, BK)
    for item in tl.range(tl.program_id(0), blocks * SPLIT, tl.num_programs(0)):
        n = (item % blocks) * BN + tl.arange(0, BN)
        split = item // blocks
        inside = n < N
        at = w + n.to(tl.int64)[:, None] * stride_w
        first = split * depth
        end = tl.minimum(K, first + depth)
        a0 = tl.zeros((BN, BK), tl.float32)
        a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
        tile = _weights(at, first + lane, inside, end)
        if PDL:
            tl.extra.cuda.gdc_wait()
        for start in tl.range(first, end, BK):
            k = start + lane
            ahead = _weights(at, k + BK, inside, end)
            weight = tile.to(tl.float32)
            a0 = _add(a0, weight, x, k, end, BN)
            if M > 1:
                a1 = _add(a1, weight, x + stride_x, k, end, BN)
            if M > 2:
                a2 = _add(a2, weight, x + 2 * stride_x, k, end, BN)
            if M > 3:
                a3 = _add(a3, weight, x + 3 * stride_x, k, end, BN)
            if M > 4:
                a4 = _add(a4, weight, x + 4 * stride_x, k, end, BN)
            if M > 5:
                a5 = _add(a5, weight, x + 5 * stride_x, k, end, BN)
            if M > 6:
                a6 = _add(a6, weight, x + 6 * stride_x, k, end, BN)
            if M > 7:
                a7 = _add(a7, weight, x + 7 * stride_x, k, end, BN)
            tile = ahead
        _end(a0, 0, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 1:
            _end(a1, 1, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 2:
            _end(a2, 2, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 3:
            _end(a3, 3, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 4:
            _end(a4, 4, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 5:
            _end(a5, 5, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 6:
            _end(a6, 6, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if M > 7:
            _end(a7, 7, n, inside, part, N, M, split, bias, residual, y, stride_r, stride_y, SPLIT)
        if SPLIT > 1:  # noqa: SIM102  (known when compiled; what follows is not)
            if arrives_last(counter + item % blocks, SPLIT):
                for m in tl.static_range(M):
                    sums = tl.zeros((BN,), tl.float32)
                    for s in tl.static_range(SPLIT):
                        sums += tl.load(part + (s * M + m) * N + n, mask=inside, other=0.0, cache_modifier=".cg")
                    _finish(sums, m, n, inside, bias, residual, y, stride_r, stride_y)


def gemv(
    x, w, bias, residual, y=None, *, threads=256, unroll=2, rows_per_warp=1, split_k=1, grid=1 << 30, pdl=False
):  # fmt: skip
    (m, k), n = x.shape, w.shape[0]
    if y is None:
        y = empty((m, n), x)
    together(x, w, bias, residual, y)
    if m > MOST_ROWS or w.shape != (n, k) or y.shape != (m, n) or not x.dtype == w.dtype == y.dtype:
        refuse(f"gemv takes x[M,K], w[N,K], y[M,N] of one dtype, M at most {MOST_ROWS}")
    if (bias is not None and bias.shape != (n,)) or (residual is not None and residual.shape != (m, n)):
        refuse("gemv takes bias[N], residual[M,N]")
    bn, bk = tile_shape(m, x.element_size(), threads, unroll, rows_per_warp)
    blocks, split = triton.cdiv(n, bn), max(1, min(split_k, triton.cdiv(k, bk)))
    part = partials(x, split * m * n) if split > 1 else y
    counter = counters(x, blocks) if split > 1 else y
    _gemv[(min(grid, blocks * split),)](
        x, w, bias, residual, y, part, counter, n, k, x.stride(0), w.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0),
        M=m, BN=bn, BK=bk, SPLIT=split, PDL=pdl, num_warps=threads // LANES, launch_pdl=pdl, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def tile_shape(m, size, threads, unroll, rows_per_warp):
    """[rows of w, depth] of a program's tile: a row a warp; fewer loads a lane where M accumulators need registers."""
    fewer = max(1, unroll // (1 if m == 1 else 2 if m <= 4 else 4))
    return threads // LANES * (1 << (rows_per_warp - 1).bit_length()), LANES * VECTOR_BYTES // size * fewer
