"""Knobs of attention over a cache (attn, paged_attn), of causal prefill and of the append to a cache.

A key costs one row of K and one of V, read once for all query heads that share them. Figures behind the constants:
kernels/cpu/{attn_decode,paged_attn_decode,attn_prefill}.cpp.
"""

from __future__ import annotations

import math

from autosel.knobs.cpu.facts import CpuFacts, bandwidth_threads, multiply_rate, worthwhile_threads
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

# Below the minimum, softmax and loop ends dominate; above the maximum, scores leave L1 without a gain.
LEAST_TILE, ENOUGH_TILE, MOST_TILE = 16, 64, 128
# The same for AMX, which reads a tile once: on Emerald Rapids 256 keys take 2 to 6 % less than 128, and those less than
# 64. A thread gets some tiles at least, so that shares are equal.
MOST_AMX_TILE, TILES_A_THREAD = 256, 4
AMX_ROWS, AMX_WIDTH = 16, 32  # query rows of a KV head, and multiples of D, that kernels/cpu/attention_amx.h takes
# Share of the multiplier's peak that scores, softmax and P V together reach: on Zen 4 50 cycles per key at D=128, of
# which the dots alone take 32; at D=64 28 and 16.
PEAK_SHARE = 0.6


def decode(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads, tile, chunk and prefetch."""
    return Knobs(settings=(_threads(w, f), _tile(w, f), _chunk(w, f), _prefetch(w, f)))


def prefill(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads: all cores, because arithmetic limits it from a few dozen positions on."""
    flops = 2 * w["B"] * w["Hq"] * w["S"] * w["S"] * w["D"]
    serial_s = flops / (PEAK_SHARE * multiply_rate(w, f))
    return Knobs(
        settings=(
            Knob(
                name="threads",
                value=worthwhile_threads(f, serial_s),
                formula="cpus if serial_s * (1 - 1/cpus) > 2 * fork_join_s else 1",
                inputs={"serial_s": serial_s, "cpus": f.cpus, "fork_join_s": f.fork_join_s},
            ),
        )
    )


def append(w: Workload, f: CpuFacts) -> Knobs:
    """Return threads: one, until the copy takes longer than two fork-joins."""
    copied = 4 * w["B"] * w["Hkv"] * w["S"] * w["D"] * DTYPE_BYTES[w.dtype]
    serial_s = copied / f.read_1
    threads = bandwidth_threads(f) if worthwhile_threads(f, serial_s) > 1 else 1
    return Knobs(
        settings=(
            Knob(
                name="threads",
                value=threads,
                formula="T = threads that saturate memory if serial_s * (1 - 1/cpus) > 2 * fork_join_s else 1",
                inputs={"serial_s": serial_s, "cpus": f.cpus, "fork_join_s": f.fork_join_s, "T": bandwidth_threads(f)},
            ),
        )
    )


# --- decode -----------------------------------------------------------------------------------------------------------


def _threads(w: Workload, f: CpuFacts) -> Knob:
    """Return the number of threads that saturates memory, or more if arithmetic would not keep pace; `chunk` lowers it
    for a short cache."""
    keys = _keys(w) * w["B"] * w["Hkv"]
    bytes_read, saturating, rate = keys * _key_bytes(w), bandwidth_threads(f), PEAK_SHARE * multiply_rate(w, f)
    flops = 4 * keys * w["Hq"] // w["Hkv"] * w["S"] * w["D"]
    keeping_pace = math.ceil(flops / rate * f.read_all / bytes_read)
    return Knob(
        name="threads",
        value=min(f.cpus, max(saturating, keeping_pace)),
        formula="min(cpus, max(T, ceil(flops / rate * read_all / bytes))), "
        "T = min(cpus, max(L3 domains * ceil(read_L3 / read_1), ceil(read_all / read_1)))",
        inputs={
            "cpus": f.cpus,
            "T": saturating,
            "flops": flops,
            "rate": rate,
            "bytes": bytes_read,
            "read_all": f.read_all,
        },
        reason="memory-bound" if keeping_pace <= saturating else "compute-bound: as many as keep pace with memory",
    )


def _tile(w: Workload, f: CpuFacts) -> Knob:
    """Return the number of keys worked on together: a tile's rows of K and V fill L1, where further blocks of query
    rows find them.

    On two Zen 5 cores, D = 128: twice as many, which leave V no room, take up to 6 % longer (1 % less over pages), on
    Zen 3 up to 5 %; half as many take 1 to 5 % longer. D = 256, where 32 would fill L1: 64, of which K alone leaves a
    third of Zen 5's 48 KB free, take 3 % less; on Zen 3, where K alone takes all 32 KB, 6 % longer. Not used: with one
    query row per KV head, twice as many take up to 11 % less on Zen 4, and longer on the others.
    """
    if f.amx and _by_amx(w):
        return _amx_tile(w, f)
    row_bytes = w["D"] * DTYPE_BYTES[w.dtype]
    fits = max(LEAST_TILE, min(MOST_TILE, 1 << (max(1, f.l1d_bytes // (2 * row_bytes)).bit_length() - 1)))
    keys_alone = fits < ENOUGH_TILE and ENOUGH_TILE * row_bytes <= f.l1d_bytes * 2 // 3
    return Knob(
        name="tile",
        value=ENOUGH_TILE if keys_alone else fits,
        formula=f"largest power of two <= L1 / (2 * D * b), within {LEAST_TILE}..{MOST_TILE}; "
        f"at least {ENOUGH_TILE} where so many * D * b <= 2/3 L1",
        inputs={"L1": f.l1d_bytes, "D*b": row_bytes},
        reason="further blocks of query rows find the tile in L1; the next tile is fetched into L2 meanwhile",
    )


def _by_amx(w: Workload) -> bool:
    return w.dtype == "bf16" and w["Hq"] // w["Hkv"] * w["S"] <= AMX_ROWS and w["D"] % AMX_WIDTH == 0


def _amx_tile(w: Workload, f: CpuFacts) -> Knob:
    """Return the number of keys of a tile that AMX multiplies: the more, the fewer pages are begun in memory."""
    keys, threads, row_bytes = _keys(w) * w["B"] * w["Hkv"], _threads(w, f).value, w["D"] * DTYPE_BYTES[w.dtype]
    most = max(1, min(keys // (TILES_A_THREAD * int(threads)), f.l2_bytes // (8 * row_bytes)))
    return Knob(
        name="tile",
        value=max(LEAST_TILE, min(MOST_AMX_TILE, 1 << (most.bit_length() - 1))),
        formula=f"largest power of two <= min(keys / ({TILES_A_THREAD} * threads), L2 / (8 * D * b)), "
        f"within {LEAST_TILE}..{MOST_AMX_TILE}",
        inputs={"keys": keys, "threads": threads, "L2": f.l2_bytes, "D*b": row_bytes},
        reason="all query rows are multiplied at once; two tiles of K and V take half of L2",
    )


def _chunk(w: Workload, f: CpuFacts) -> Knob:
    """Return the minimum number of keys in a thread's share: their time equals two fork-joins."""
    flops = 4 * w["Hq"] // w["Hkv"] * w["S"] * w["D"]
    key_s = max(_key_bytes(w) / f.read_1, flops / (PEAK_SHARE * multiply_rate(w, f)))
    return Knob(
        name="chunk",
        value=max(1, math.ceil(2 * f.fork_join_s / key_s)),
        formula="ceil(2 * fork_join_s / key_s), key_s = max(2 * D * b / read_1, 4 * G * S * D / rate)",
        inputs={"fork_join_s": f.fork_join_s, "key_s": key_s},
        reason="the kernel wakes min(threads, keys / chunk): the cut follows the real lengths, not the bucket",
    )


def _prefetch(w: Workload, f: CpuFacts) -> Knob:
    """Return how many keys the second request for a row precedes its use: twice what memory delivers within its
    latency."""
    ahead = 2 * f.read_1 * f.dram_latency_s / _key_bytes(w)
    return Knob(
        name="prefetch",
        value=max(4, math.ceil(ahead / 4) * 4),
        formula="2 * read_1 * latency / (2 * D * b), up to a multiple of 4",
        inputs={"read_1": f.read_1, "latency": f.dram_latency_s, "2*D*b": _key_bytes(w)},
        reason="the first request, a tile ahead, is dropped where the queue to memory is full",
    )


# --- shared -----------------------------------------------------------------------------------------------------------


def _keys(w: Workload) -> int:
    """Return the number of keys that some query sees."""
    window = int(w.trait("window", 0))
    return min(w["L"], window + w["S"] - 1) if window else w["L"]


def _key_bytes(w: Workload) -> int:
    return 2 * w["D"] * DTYPE_BYTES[w.dtype]
