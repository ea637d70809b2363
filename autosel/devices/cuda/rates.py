"""Derive a GPU's rates from raw readings, and check whether they are plausible. Pure: no device.

Ranges and fits: research into published microbenchmarks, named at each. Symbols as in knobs/gpu/facts.py.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RAMP_SHARE = 0.70  # of the read rate: where the ramp's latency is loaded, and bandwidth is not yet the limit
MEASURED = {  # every rate of a GPU's fingerprint, and its method (bench.py, cost.py, arithmetic.py)
    "read_bytes_per_s": "16-byte loads, eight in flight per thread, over a gigabyte of random bytes",
    "copy_bytes_per_s": "read and written bytes of a copy as large",
    "dram_latency_s": "Little's law where a ramp of bytes in flight reaches 70 % of the read rate",
    "saturating_sms": "the fewest SMs whose read rate reaches 95 % of the maximum over all numbers",
    "l2_bytes_per_s": "chunks shared by two blocks, read repeatedly past L1: the plateau",
    "l2_effective_bytes": "the largest set that still reads at 0.9 of this rate",
    "sm_bytes_per_s": "the most that one SM draws from L2, over numbers of SMs that read",
    "sm_clock_hz": "clock ticks over events, every SM busy",
    "l1_latency_s": "a chase over 64 KiB in random order",
    "l2_latency_s": "over 8 MiB or half of L2",
    "l2_far_latency_s": "over 0.8 of L2",
    "idle_dram_latency_s": "over a gigabyte",
    "stream_launch_s": "one kernel of a queue",
    "graph_node_s": "one kernel of a graph",
    "pdl_node_s": "one link of a chain of programmatic dependent launches",
    "flag_barrier_s": "all SMs meeting at a counter in memory",
    "grid_sync_s": "the same by cooperative groups, if the toolkit's header is installed",
    "persistent_saving_s": "a dependent launch less a barrier",
    "read_floor_s": "a of t = a + V / b over nodes of a graph that read 64 KiB to 3 MiB each, out of DRAM",
    "host_launch_s": "the host's time for a launch",
    "host_answer_s": "the host's time for four bytes of an answer",
    "from_device_bytes_per_s": "a pinned copy to the host",
    "to_device_bytes_per_s": "a pinned copy from the host",
    "exp_per_s": "2^x, eight dependent chains per thread, sixteen warps per SM",
    "exp_per_clock_sm": "the same by the SM's clock",
    "fma_flops": "fp32 multiply-adds in such chains",
    "fma_flop_per_clock_sm": "the same by the SM's clock",
    "shared_bytes_per_s": "16-byte loads from shared memory, without bank conflicts",
    "shared_bytes_per_clock_sm": "the same by the SM's clock",
    "from_fp8_per_s": "e4m3 to fp16, two an instruction (8.9 and later)",
    "from_fp8_per_clock_sm": "the same by the SM's clock",
    "mma_bf16_flops": "a warp's matrix instruction, operands in registers",
    "mma_fp8_flops": "the same in e4m3, where a warp has it (8.9, 12.0)",
    "matrix_clock_hz": "the device's clock under such products",
    "bf16_matrix_flops": "PyTorch's product of 8192^3 random numbers",
    "fp8_matrix_flops": "the same in e4m3 (8.9 and later)",
}
PLATEAU_SHARE = 0.90  # of the best L2 rate, reached by a chunk set that still fits L2


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """Hold one reading of a sweep: bytes in flight, a set's bytes, or a kernel's bytes; and bytes/s or seconds."""

    size: float
    value: float


def loaded_latency_s(ramp: Sequence[SweepPoint], read_bytes_per_s: float) -> float:
    """Return lambda by Little's law: bytes in flight over bandwidth, where the ramp crosses 70 % of the read rate.

    `ramp`: (bytes in flight, bytes/s), rising. Linear between two points. Raises ValueError for a ramp that never gets
    there, or starts above.
    """
    wanted = RAMP_SHARE * read_bytes_per_s
    points = sorted(ramp, key=lambda p: p.size)
    for before, after in itertools.pairwise(points):
        if before.value < wanted <= after.value:
            part = (wanted - before.value) / (after.value - before.value)
            return (before.size + part * (after.size - before.size)) / wanted
    low, high = points[0].value / read_bytes_per_s, points[-1].value / read_bytes_per_s
    raise ValueError(f"the ramp runs from {low:.0%} to {high:.0%} of the read rate and never crosses 70 %")


def latency_beside_s(ramp: Sequence[SweepPoint], read_bytes_per_s: float) -> float:
    """Return lambda by Little's law at the point of a ramp nearest to 70 % of the read rate; the ramp need not cross
    it."""
    nearest = min(ramp, key=lambda p: abs(p.value - RAMP_SHARE * read_bytes_per_s))
    return nearest.size / nearest.value


def effective_l2_bytes(sweep: Sequence[SweepPoint]) -> float:
    """Return the largest set that still reads at 0.9 of the best rate of all smaller sets: not all of nominal L2 is
    usable."""
    points = sorted(sweep, key=lambda p: p.size)
    best = max(p.value for p in points)
    fits = [p.size for p in points if p.value >= PLATEAU_SHARE * best]
    return max(fits)


def l2_bytes_per_s(sweep: Sequence[SweepPoint]) -> float:
    """Return the median over the sets on the plateau."""
    edge, best = effective_l2_bytes(sweep), max(p.value for p in sweep)
    return statistics.median(p.value for p in sweep if p.size <= edge and p.value >= PLATEAU_SHARE * best)


def sms_to_saturate(sweep: Sequence[SweepPoint], share: float = 0.95) -> int:
    """Return the fewest SMs whose read rate reaches `share` of the most that any count reached. `sweep`: (SMs,
    bytes/s)."""
    best = max(p.value for p in sweep)
    return int(min(p.size for p in sweep if p.value >= share * best))


def per_item_s(few: tuple[int, float], many: tuple[int, float]) -> float:
    """Return seconds per item from two (count, seconds): the common cost of both runs cancels."""
    return (many[1] - few[1]) / (many[0] - few[0])


def floor_s(reads: Sequence[SweepPoint]) -> float:
    """Return a of t = a + V / b by least squares: a kernel's cost in addition to the V bytes it reads. `reads`: (V,
    seconds)."""
    return statistics.linear_regression([p.size for p in reads], [p.value for p in reads]).intercept


# --- is it believable? -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bound a figure of a healthy device; `why` names the yardstick."""

    low: float
    high: float
    why: str


def complaints(rates: Mapping[str, float], identity: Mapping[str, object], peak_read_bytes_per_s: float) -> list[str]:
    """Return each figure outside its range, in words. An implausible figure is reported, never corrected."""
    found = []
    for name, allowed in _ranges(rates, identity, peak_read_bytes_per_s).items():
        value = rates.get(name)
        if value is not None and not allowed.low <= value <= allowed.high:
            found.append(f"{name} {value:.4g} is outside {allowed.low:.4g} .. {allowed.high:.4g}: {allowed.why}")
    return found + _disorder(rates)


def _ranges(rates: Mapping[str, float], identity: Mapping[str, object], peak: float) -> dict[str, Range]:
    read, sms = rates.get("read_bytes_per_s", 0.0), float(str(identity["sm_count"]))
    ranges = {
        "dram_latency_s": Range(low=0.35e-6, high=1.2e-6, why="loaded DRAM latency of every GPU measured so far"),
        "graph_node_s": Range(low=0.4e-6, high=4e-6, why="a kernel inside a graph"),
        "stream_launch_s": Range(low=0.4e-6, high=6e-6, why="a kernel queued on a stream"),
        "read_floor_s": Range(low=0.4e-6, high=4e-6, why="a small kernel's cost in addition to its bytes"),
        "l2_bytes_per_s": Range(low=1.1 * read, high=20 * max(read, 1.0), why="L2 is faster than DRAM"),
        "sm_bytes_per_s": Range(low=read / sms, high=math.inf, why="an SM draws its share of DRAM's rate at least"),
    }
    if peak:
        why = f"share of the {peak / 1e9:.0f} GB/s that bus width and memory clock give"
        near = Range(low=0.80 * peak, high=0.99 * peak, why=why)
        ranges |= {"read_bytes_per_s": near, "copy_bytes_per_s": near}
    return ranges | _of_arithmetic(rates, identity, sms)


def _of_arithmetic(rates: Mapping[str, float], identity: Mapping[str, object], sms: float) -> dict[str, Range]:
    """Bound rates per clock by the CUDA C++ Programming Guide (arithmetic instructions; shared memory), and matrix
    products by the clock of the device under such products."""
    special = float(str(identity.get("sfu_per_clock_sm", 16)))
    fma = 128.0 if str(identity["cc"]) == "8.0" else 256.0  # two FLOP of 64 or 128 lanes
    ranges = {
        "exp_per_clock_sm": Range(low=0.9 * special, high=1.1 * special, why="special-function units"),
        "fma_flop_per_clock_sm": Range(low=0.9 * fma, high=1.02 * fma, why="two FLOP a lane a clock"),
        "shared_bytes_per_clock_sm": Range(low=0.8 * 128, high=1.02 * 128, why="32 banks of 4 bytes a clock"),
    }
    per_clock = float(str(identity.get("matrix_flop_per_clock_sm", 0)))
    clock = rates.get("matrix_clock_hz") or rates.get("sm_clock_hz", 0.0)
    if per_clock and clock:
        top, why = per_clock * sms * clock, "matrix FLOP a clock x the clock measured under products"
        ranges["bf16_matrix_flops"] = Range(low=0.70 * top, high=1.02 * top, why=why)
        # A kernel of plain warps need not reach a warp group's rate; none exceeds it.
        ranges["mma_bf16_flops"] = Range(low=0.40 * top, high=1.02 * top, why=why)
        bf16 = rates.get("bf16_matrix_flops", 0.0)
        ranges["fp8_matrix_flops"] = Range(low=0.9 * bf16, high=2.04 * top, why="fp8 is bf16's rate to twice that")
    return ranges


def _disorder(rates: Mapping[str, float]) -> list[str]:
    """Return latencies that do not rise from level to level."""
    levels = ("l1_latency_s", "l2_latency_s", "l2_far_latency_s", "idle_dram_latency_s")
    order = [name for name in levels if name in rates]
    return [
        f"{far} {rates[far]:.3g} s is below {near} {rates[near]:.3g} s"
        for near, far in itertools.pairwise(order)
        if rates[far] < rates[near]
    ]
