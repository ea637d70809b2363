"""What the projections of few rows share: weights streamed past M <= 8 activation rows on CUDA cores. No kernel here.

A program owns BN rows of w and walks along K in steps of BK; the next tile of weights is loaded before this one is
used. x is read through a tile of pointers as wide as w's, so that its values lie in the registers that need them and no
step crosses shared memory; for the same reason M rows are M accumulators, not a dimension.
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import row

VECTOR_BYTES, LANES = 16, 32
MOST_ROWS = 8


def tile_shape(m, size, threads, unroll, rows_per_warp, weights=1):
    """[rows of w, depth] of a program's tile: a row or several a warp, `unroll` loads a lane and row; less of either
    where accumulators, one a row of x and weight, and a second weight's tiles would take more than 64 registers."""
    rows, vector = 1 << (rows_per_warp - 1).bit_length(), VECTOR_BYTES // size
    while rows * unroll * vector * m * weights**2 > 64 and rows * unroll > 1:
        rows, unroll = (rows // 2, unroll) if rows > 1 else (rows, unroll // 2)
    return threads // LANES * rows, LANES * vector * unroll


@triton.jit
def weights(at, k, inside, end):
    return tl.load(at + k[None, :], mask=inside[:, None] & (k < end)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def stream(
    w, u, inside, x, norm, offset, begin, end, stride_x,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr, PDL: tl.constexpr,
    WALK: tl.constexpr = False,
):  # fmt: skip
    """Products over k in [begin, end), tuples of M tensors: with w, with u (if TWO), and (if NORM) of x with itself.

    w, u: pointers [BN, 1] to rows. With NORM each x is multiplied by (norm + offset) on the way to w and u. With PDL
    the first weights are under way before the wait for the kernel that makes x. With WALK a row of x is reached from
    the one before it, in two registers; else each has its base, in two of its own.
    """
    lane = tl.arange(0, BK)
    sums, others, squares = (), (), ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros((BN, BK), tl.float32),)
        if TWO:
            others = others + (tl.zeros((BN, BK), tl.float32),)
        if NORM:
            squares = squares + (tl.zeros((BK,), tl.float32),)
    tile = weights(w, begin + lane, inside, end)
    pair = tile
    if TWO:
        pair = weights(u, begin + lane, inside, end)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(begin, end, BK):
        k = start + lane
        ahead = weights(w, k + BK, inside, end)
        ahead_pair = ahead
        if TWO:
            ahead_pair = weights(u, k + BK, inside, end)
        spread = k[None, :] + tl.zeros((BN, 1), tl.int32)
        deep = spread < end
        one, two = tile.to(tl.float32), pair.to(tl.float32)
        if NORM:
            scale = tl.load(norm + spread, mask=deep, other=0.0).to(tl.float32) + offset
            one = one * scale
            if TWO:
                two = two * scale
        next_sums, next_others, next_squares = (), (), ()
        at = x + spread
        for m in tl.static_range(M):
            if not WALK:
                at = row(x, m, stride_x) + spread
            value = tl.load(at, mask=deep, other=0.0).to(tl.float32)
            if WALK:
                at = row(at, 1, stride_x)
            next_sums = next_sums + (sums[m] + one * value,)
            if TWO:
                next_others = next_others + (others[m] + two * value,)
            if NORM:
                flat = tl.load(row(x, m, stride_x) + k, mask=k < end, other=0.0).to(tl.float32)
                next_squares = next_squares + (squares[m] + flat * flat,)
        sums, others, squares, tile, pair = next_sums, next_others, next_squares, ahead, ahead_pair
    return sums, others, squares
