"""Compute knobs of the projections: linear (gemv, gemm), norm_qkv, gate_up, lm_head.

For few rows of x (M <= 8) the weights stream through dot.h; for more rows block.h turns the weights. Both prefetch into
L2, so L2 limits what is read together; L1 holds the turned block. Figures behind the constants:
kernels/cpu/{dot,block}.h.

The crossover: per row of x both need the same multiplies, provided that registers hold sums for two rows of weights per
load of x (8 rows of x on 32 registers; 6 on 16, and two groups share a walk: rows_together). gemm additionally pays for
turning; dot.h additionally needs a second walk over the weights from the ninth row of x on. Where the CPU has AMX, four
to eight rows of bf16 x are multiplied by its tiles (amx.h), which need no knob: `rows` then matters up to three.
"""

from __future__ import annotations

import math

from autosel.formats import PART_BYTES
from autosel.knobs.cpu.facts import CpuFacts, bandwidth_threads, multiply_rate, paired, worthwhile_threads
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

MAX_ROWS = 8  # rows of x in one walk of dot.h
# Sizes of x, as shares of L1, for which reading one row of weights after another is faster. Zen 5, 48 KB in 12 ways,
# two vector loads per cycle: up to 20 KB (figures: dot.h). Zen 4, 32 KB in 8 ways, one load per cycle: from the size at
# which several rows of weights, each in a separate page, would evict x, to the size at which one does. Speedup of one
# row over the most that registers hold, 8 or 4, on two cores of Zen 4 at 18 to 36 GB/s, medians:
#   x of 16 to 25 KB   bf16 M=4 1.02-1.25, M=5 1.09-1.28, M=6 1.05-1.15; fp32 M=4 1.01, M=6 1.05
#                      against 8: bf16 M=2 0.93, M=3 0.92; fp32 M=2 0.87; fp16 M=2 1.0
#   8 or 12 KB         bf16 M=2 0.63-1.03, M=3 0.83; fp32 M=2 0.82
#   29 KB and more     0.39-0.67
#   rows below a page  bf16 0.70-1.01, fp16 0.72-0.80
WIDE_L1 = 48 << 10
X_SHARES_WIDE, X_SHARES = (0.0, 0.4375), (0.5, 0.8)
PAGE = 4096
CODES_IN_BLOCK = 256  # kBlockCodes of kernels/cpu/codes.h: the pieces of every format of codes divide it

# (rows of x, rows of all weights, their length) by op.
_SHAPE = {
    "linear": ("M", "N", "K"),
    "norm_qkv": ("M", "N", "d"),
    "gate_up": ("M", "I", "d"),
    "lm_head": ("M", "V", "d"),
}


def by_dots(rows: int) -> bool:
    """Choose the route: few rows of x as dot products (gemv; dot.h), more of them in turned blocks (gemm; block.h)."""
    return rows <= MAX_ROWS


def gemv(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads and rows."""
    return Knobs(settings=(_threads(w, f), _rows(w, f)))


def gemm(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads, k_block, k_ahead and m_block."""
    return Knobs(settings=(_threads(w, f), *_walk(w, f)))


def fused(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads; rows up to M = 8, 0 above it, where gemm's walk runs. All are given: the unused route ignores its
    own."""
    return Knobs(settings=(_threads(w, f), _rows_of_few(w, f), *_walk(w, f)))


def gemm_coded(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads, k_block and m_block."""
    return Knobs(settings=(_threads(w, f), _coded_k_block(w, f), _m_block(w, f)))


def fused_coded(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads; rows up to M = 8, 0 above it, where gemm_coded's walk runs, with its k_block and m_block."""
    return Knobs(settings=(_threads(w, f), _rows_of_few(w, f), _coded_k_block(w, f), _m_block(w, f)))


# --- threads ---------------------------------------------------------------------------------------------------------


def _threads(w: Workload, f: CpuFacts) -> Knob:
    """Return one thread while a fork-join costs more than it saves; else the threads that saturate memory; all cores if
    arithmetic is the limit."""
    m, n, k = _dims(w)
    bytes_read, flops, rate = n * k * _weight_bytes(w), 2 * m * n * k, multiply_rate(w, f)
    serial_s = max(bytes_read / f.read_1, flops / rate)
    saturating = bandwidth_threads(f)
    compute_bound = flops / (saturating * rate) > bytes_read / f.read_all
    if worthwhile_threads(f, serial_s) == 1:
        value, reason = 1, "a fork-join costs more than it saves"
    elif compute_bound:
        value, reason = f.cpus, "compute-bound: M > b * T * flops / (2 * read)"
    else:
        value, reason = saturating, "memory-bound: fewest threads that saturate the memory"
    return Knob(
        name="threads",
        value=value,
        formula="1 if serial_s * (1 - 1/cpus) <= 2 * fork_join_s; cpus if flops / (T * rate) > bytes / read_all; "
        "else T = min(cpus, max(L3 domains * ceil(read_L3 / read_1), ceil(read_all / read_1))), cpus if contended",
        inputs={
            "serial_s": serial_s,
            "fork_join_s": f.fork_join_s,
            "cpus": f.cpus,
            "T": saturating,
            "flops": flops,
            "rate": rate,
            "bytes": bytes_read,
            "read_all": f.read_all,
            "read_1": f.read_1,
            "contended": f.contended,
        },
        reason=reason,
    )


def _weight_bytes(w: Workload) -> float:
    """Return the bytes per weight that stream from memory: its code, without its share of a scale."""
    found = w.weight_format
    return PART_BYTES[found.parts[0].dtype or w.dtype] if found.plain else found.bits / 8


# --- dot.h -----------------------------------------------------------------------------------------------------------


def _rows(w: Workload, f: CpuFacts) -> Knob:
    """Return the rows of weights that share one load of x: as many as registers hold sums for, while two lots fit half
    of L2.

    With many registers and x in L1, loading x costs nothing, and reading one row of weights after another is the better
    stream: 1.02 to 1.2 times as fast on two Zen 5 cores. On two Zen 4 cores it is the worse one (rows shorter than a
    page up to 1.4, two rows of x up to 1.6 times as slow), unless it alone keeps x in L1, against four at a time: then
    1.02 to 1.28 times as fast.
    """
    (m, _, k), registers = _dims(w), _registers(f)
    row_bytes, group = k * _weight_bytes(w), rows_together(m, f)
    most = next(r for r in (8, 4, 3, 2, 1) if r * group <= registers)
    fits = f.l2_bytes // 4 // row_bytes
    value = most if most <= fits else 4 if most == 8 and fits >= 4 else 1
    x_bytes = group * k * (2 if paired(w, f) else 4)
    wide = f.l1d_bytes >= WIDE_L1
    low, high = X_SHARES_WIDE if wide else X_SHARES
    in_l1 = group > 1 and registers > 12 and low * f.l1d_bytes <= x_bytes <= high * f.l1d_bytes
    in_l1 = in_l1 and (wide or (most < 8 and row_bytes >= PAGE))
    value = 1 if in_l1 else value
    return Knob(
        name="rows",
        value=value,
        formula=f"1 if 1 < group, registers > 12 and x <= {X_SHARES_WIDE[1]} * L1 of 48 KB or more, or 3 < group, "
        f"K * b >= {PAGE} and {X_SHARES[0]} * L1 <= x <= {X_SHARES[1]} * L1 of less; "
        "else largest R of 8, 4, 3, 2, 1 with R * group <= registers and R * K * b <= L2 / 4; "
        "group = ceil(m / ceil(m / most)), m = min(M, 8), most = registers / 2",
        inputs={
            "M": m,
            "group": group,
            "registers": registers,
            "x": x_bytes,
            "L1": f.l1d_bytes,
            "K*b": row_bytes,
            "L2": f.l2_bytes,
        },
        reason="x fits into L1 with the weights: one stream of them"
        if in_l1
        else "x is loaded once for R rows; the next R rows are fetched into L2 meanwhile",
    )


def rows_together(m: int, f: CpuFacts) -> int:
    """Return the largest of the equal groups in which one walk's rows of x are multiplied. Registers must hold sums for
    two rows of weights together, because with only one, x is loaded from L2 more often than L2 can deliver."""
    m = min(m, MAX_ROWS)
    groups = math.ceil(m / (_registers(f) // 2))
    return math.ceil(m / groups)


def _rows_of_few(w: Workload, f: CpuFacts) -> Knob:
    if by_dots(w["M"]):
        return _rows(w, f)
    return Knob(name="rows", value=0, formula="0 where M > 8: blocked", inputs={"M": w["M"]})


# --- block.h ---------------------------------------------------------------------------------------------------------


def _walk(w: Workload, f: CpuFacts) -> tuple[Knob, Knob, Knob]:
    k_block = _k_block(w, f)
    return k_block, _k_ahead(w, f, int(k_block.value)), _m_block(w, f)


def _k_block(w: Workload, f: CpuFacts) -> Knob:
    """Return the elements of K turned at a time: the turned block, strip x lanes x 4 bytes, takes half of L1."""
    vector, per_lane = _lanes(f), 2 if paired(w, f) else 1
    lanes = max(vector, f.l1d_bytes // 2 // (4 * 2 * vector) // vector * vector)
    return Knob(
        name="k_block",
        value=lanes * per_lane,
        formula="L1 / 2 / (4 * strip), down to whole vectors, times elements a lane",
        inputs={"L1": f.l1d_bytes, "strip": 2 * vector, "elements a lane": per_lane},
        reason="the block is read by every tile of x; x's tile and the sums have the other half",
    )


def _coded_k_block(w: Workload, f: CpuFacts) -> Knob:
    """Return the elements of K whose codes become weights at a time: whole blocks of codes, at least one."""
    vector, per_lane = _lanes(f), 2 if paired(w, f) else 1
    blocks = f.l1d_bytes // 2 // (4 * 2 * vector) * per_lane // CODES_IN_BLOCK
    return Knob(
        name="k_block",
        value=max(1, blocks) * CODES_IN_BLOCK,
        formula=f"L1 / 2 / (4 * strip), times elements a lane, down to whole blocks of {CODES_IN_BLOCK}, at least one",
        inputs={"L1": f.l1d_bytes, "strip": 2 * vector, "elements a lane": per_lane},
        reason="the block is read by every tile of x; x's tile and the sums have the other half",
    )


def _k_ahead(w: Workload, f: CpuFacts, k_block: int) -> Knob:
    """Return the elements of each row of a strip that are fetched together: all of the row if L2 has room, else equal
    parts.

    While one part is multiplied the next is prefetched, by as much per block; after a short part the next one would not
    be complete. As much arrives as is used, so L2 holds one part. Two Zen 5 cores, bf16, blocks of 384, against parts
    of a quarter of L2, the last one shorter: N=K=4096 1.05 (M=128) to 1.19 (M=32), N=2048, K=8192 up to 1.16; against
    two equal parts, N=4096, K=14336: 1.02 (M=64) to 1.10 (M=16).
    """
    (_, _, k), strip, size = _dims(w), 2 * _lanes(f), DTYPE_BYTES[w.dtype]
    most = max(k_block, 7 * f.l2_bytes // 8 // (strip * size))
    parts = math.ceil(k / most)
    return Knob(
        name="k_ahead",
        value=math.ceil(k / parts / k_block) * k_block,
        formula="K / parts, up to whole blocks; parts = ceil(K / max(k_block, 7 * L2 / 8 / (strip * b)))",
        inputs={"K": k, "L2": f.l2_bytes, "strip": strip, "b": size, "k_block": k_block},
        reason="rows read to their end are the order that memory likes; the sums have the other eighth of L2",
    )


def _m_block(w: Workload, f: CpuFacts) -> Knob:
    """Return the rows of x multiplied by a strip once it is turned: half of L3 holds them packed, an eighth of L2 their
    sums."""
    (m, _, k), lanes = _dims(w), _lanes(f)
    tile, strip = _registers(f) // 2, 2 * lanes
    row_bytes = math.ceil(k / (2 if paired(w, f) else 1)) * 4
    by_l3 = f.l3_bytes // (2 * f.cpus * row_bytes)
    by_l2 = f.l2_bytes // (8 * 4 * strip)
    return Knob(
        name="m_block",
        value=max(1, min(by_l3, by_l2) // tile) * tile,
        formula="min(L3 / (2 * cpus * row_bytes), L2 / (8 * 4 * strip)), down to whole tiles, at least one",
        inputs={
            "M": m,
            "L3": f.l3_bytes,
            "L2": f.l2_bytes,
            "cpus": f.cpus,
            "row_bytes": row_bytes,
            "strip": strip,
            "tile": tile,
        },
        reason="weights are turned again for every such chunk; each thread packs x separately",
    )


# --- the kernels' constants (dot.h, block.h), by instruction set -----------------------------------------------------


def _lanes(f: CpuFacts) -> int:
    return 16 if f.isa.startswith("avx512") else 8


def _registers(f: CpuFacts) -> int:
    """Return how many of 32 (AVX-512) or 16 registers hold sums."""
    return 24 if f.isa.startswith("avx512") else 12


def _dims(w: Workload) -> tuple[int, int, int]:
    m, n, k = (w[d] for d in _SHAPE[w.op])
    return m, n * 2 if w.op == "gate_up" else n, k
