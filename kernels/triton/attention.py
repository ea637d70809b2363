"""Parts shared by the attention kernels: online softmax over tiles of keys, and the sum of split parts.

Defines no kernel. The query rows of one KV head are packed: row r = g S + s is query s of query head h G + g. The state
of a row is its running maximum, the sum of its weights and its unnormalised output, all in fp32. A row that has seen no
key has (-inf, 0, 0).
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import LOG2E, arrives_last, tanh

MOST_ROWS = 64  # query rows of a program: the accumulators of two warps at D = 128
LEAST_TILE, LEAST_ROWS = 16, 16  # shortest sides of a matrix instruction
MOST_VALUES = 96  # outputs and scores of a thread, found by compiling for each target: 128 spill


def rows_block(rows, width):
    """Return the query rows of a program: a decode step's, padded to a matrix instruction; fewer for wide heads."""
    most = MOST_ROWS if width <= 128 else MOST_ROWS // 2 if width <= 256 else LEAST_ROWS
    return max(LEAST_ROWS, min(most, triton.next_power_of_2(rows)))


def fitting_tile(tile, stages, width, size, shared):
    """Return (keys of a tile, stages) that fit `shared`: `tile` is halved first, then there are fewer stages.

    A tile is never shorter than a side of a matrix instruction, whatever the knobs say.
    """
    tile = max(tile, LEAST_TILE)
    while tile > LEAST_TILE and stages * tile * 2 * width * size > shared:
        tile //= 2
    while stages > 1 and stages * tile * 2 * width * size > shared:
        stages -= 1
    return tile, stages


def unspilled_tile(tile, rows, width, threads):
    """Return the keys of a tile: halved until the outputs and scores of a program's rows fit its threads' registers."""
    while tile > LEAST_TILE and rows * (width + tile) > MOST_VALUES * threads:
        tile //= 2
    return tile


@triton.jit
def weight(score, peak):
    """Return exp(score - peak), and 0 for a score of -inf even if the peak is -inf."""
    return tl.exp2((score - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2E)


@triton.jit
def attend(q, k, v, seen, peak, total, acc, scale, softcap, CAPPED: tl.constexpr):
    """Add one tile, q[R,D], k[D,T], v[T,D], seen[R,T], to (peak[R], total[R], acc[R,D])."""
    score = tl.dot(q, k, input_precision="ieee") * scale
    if CAPPED:
        score = softcap * tanh(score / softcap)
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    p = weight(score, higher[:, None])
    kept = weight(peak, higher)
    total = total * kept + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def normalised(acc, total):
    """Return acc / total, and zeros for a row that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def keep_part(part, row, splits, split, rows, peak, total, acc, valid, d, D: tl.constexpr):
    """Store this split's state of `row` [R] (of `rows` in all): outputs, and (peak, total) behind all of them."""
    at = row.to(tl.int64) * splits + split
    tl.store(part + at[:, None] * D + d[None, :], acc, mask=valid[:, None] & (d < D)[None, :])
    state = part + rows.to(tl.int64) * splits * D + at * 2
    tl.store(state, peak, mask=valid)
    tl.store(state + 1, total, mask=valid)


@triton.jit
def sum_parts(part, row, splits, rows, valid, d, D: tl.constexpr):
    """Return the normalised output [R, d]: the splits added in order. Reads bypass L1, because other SMs wrote the
    parts.
    """
    states = part + rows.to(tl.int64) * splits * D
    peak = tl.full(row.shape, float("-inf"), tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros((row.shape[0], d.shape[0]), tl.float32)
    for split in tl.range(0, splits):
        at = row.to(tl.int64) * splits + split
        its_peak = tl.load(states + at * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(states + at * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
        inside = valid[:, None] & (d < D)[None, :]
        its_acc = tl.load(part + at[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, its_peak)
        kept, added = weight(peak, higher), weight(its_peak, higher)
        total = total * kept + its_total * added
        acc = acc * kept[:, None] + its_acc * added[:, None]
        peak = higher
    return normalised(acc, total)


@triton.jit
def deliver(
    outputs, stored, part, counter, row, rows, splits, split, peak, total, acc, valid, d, D: tl.constexpr,
    SPLIT: tl.constexpr, ARRIVAL: tl.constexpr,
):  # fmt: skip
    """Store the result, or this split's part; then the last split to arrive stores the result."""
    if not SPLIT:
        tl.store(outputs, normalised(acc, total).to(outputs.dtype.element_ty), mask=stored)
    else:
        keep_part(part, row, splits, split, rows, peak, total, acc, valid, d, D)
        if ARRIVAL:
            if arrives_last(counter, splits):
                made = sum_parts(part, row, splits, rows, valid, d, D)
                tl.store(outputs, made.to(outputs.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge(part, o, splits, rows, G, S, Hkv, stride_ob, stride_oh, stride_os, D: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the splits in a separate kernel, one packed row per program, if they are not merged on arrival."""
    row = tl.program_id(0) + tl.zeros((1,), tl.int32)
    d = tl.arange(0, WIDTH)
    made = sum_parts(part, row, splits, rows, row < rows, d, D)
    r, head = row % (G * S), row // (G * S)
    b, h, s = (head // Hkv).to(tl.int64), (head % Hkv).to(tl.int64), (r % S).to(tl.int64)
    at = b * stride_ob + (h * G + r // S) * stride_oh + s * stride_os
    tl.store(o + at[:, None] + d[None, :], made.to(o.dtype.element_ty), mask=(d < D)[None, :])
