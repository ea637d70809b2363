"""Parts shared by the projections of few rows: weights stream past M <= 8 activation rows on CUDA cores.

Defines no kernel. A program owns BN rows of w and moves along K in steps of BK; it loads the next tile of weights
before it uses this one. x is read through a tile of pointers as wide as that of w, so its values are in the registers
that need them and no step goes through shared memory. For the same reason M rows are M accumulators, not a dimension.
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import row

VECTOR_BYTES, LANES = 16, 32
MOST_ROWS = 8


def tile_shape(m, size, threads, unroll, rows_per_warp, weights=1):
    """Return [rows of w, depth] of a program's tile: one or several rows per warp, `unroll` loads per lane and row.

    Both are smaller if the accumulators (one per row of x and weight) and the tiles of a second weight would take more
    than 64 registers.
    """
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
    """Return the products over k in [begin, end), tuples of M tensors: with w, with u (if TWO), and of x with itself
    (NORM).

    w, u: pointers [BN, 1] to rows. With NORM each x is multiplied by (norm + offset) before the products with w and u.
    With PDL the first weights are loaded before the wait for the kernel that produces x. With WALK the address of a row
    of x is computed from that of the row before, in two registers; otherwise each row has its base in two registers.
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
