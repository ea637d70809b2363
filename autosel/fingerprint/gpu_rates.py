"""From a GPU's raw readings to its rates, and whether they are plausible. Pure: no device.

Ranges and fits: research into published microbenchmarks, named at each. Symbols as in knobs/gpu/facts.py.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RAMP_SHARE = 0.70  # of the read rate: where the ramp's latency is loaded, and bandwidth not yet the limit
PLATEAU_SHARE = 0.90  # of the best L2 rate: what a chunk set that still fits L2 reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One reading of a sweep: bytes in flight, a set's bytes, or a kernel's bytes; and bytes/s or seconds."""

    size: float
    value: float


def loaded_latency_s(ramp: Sequence[Point], read_bytes_per_s: float) -> float:
    """lambda by Little's law: bytes in flight over bandwidth, where the ramp crosses 70 % of the read rate.

    `ramp`: (bytes in flight, bytes/s), rising. Between two points, linear. Raises ValueError for a ramp that never
    gets there, or starts above.
    """
    wanted = RAMP_SHARE * read_bytes_per_s
    points = sorted(ramp, key=lambda p: p.size)
    for before, after in itertools.pairwise(points):
        if before.value < wanted <= after.value:
            part = (wanted - before.value) / (after.value - before.value)
            return (before.size + part * (after.size - before.size)) / wanted
    low, high = points[0].value / read_bytes_per_s, points[-1].value / read_bytes_per_s
    raise ValueError(f"the ramp runs from {low:.0%} to {high:.0%} of the read rate and never crosses 70 %")


def latency_beside_s(ramp: Sequence[Point], read_bytes_per_s: float) -> float:
    """lambda by Little's law at the point of a ramp that comes nearest to 70 % of the read rate, and need not cross."""
    nearest = min(ramp, key=lambda p: abs(p.value - RAMP_SHARE * read_bytes_per_s))
    return nearest.size / nearest.value


def effective_l2_bytes(sweep: Sequence[Point]) -> float:
    """The largest set that still reads at 0.9 of the best rate of all sets no larger: nominal L2 is not usable L2."""
    points = sorted(sweep, key=lambda p: p.size)
    best = max(p.value for p in points)
    fits = [p.size for p in points if p.value >= PLATEAU_SHARE * best]
    return max(fits)


def l2_bytes_per_s(sweep: Sequence[Point]) -> float:
    """Median over the sets on the plateau."""
    edge, best = effective_l2_bytes(sweep), max(p.value for p in sweep)
    return statistics.median(p.value for p in sweep if p.size <= edge and p.value >= PLATEAU_SHARE * best)


def sms_to_saturate(sweep: Sequence[Point], share: float = 0.95) -> int:
    """The fewest SMs whose reading reaches `share` of the most any count reached. `sweep`: (SMs, bytes/s)."""
    best = max(p.value for p in sweep)
    return int(min(p.size for p in sweep if p.value >= share * best))


def per_item_s(few: tuple[int, float], many: tuple[int, float]) -> float:
    """Seconds an item from two (count, seconds): what both runs cost beside their items cancels."""
    return (many[1] - few[1]) / (many[0] - few[0])


# --- is it believable? -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What a figure of a healthy device lies in; `why` names the yardstick."""

    low: float
    high: float
    why: str


def complaints(rates: Mapping[str, float], identity: Mapping[str, object], peak_read_bytes_per_s: float) -> list[str]:
    """Each figure outside its range, in words. An implausible figure is reported, never corrected."""
    found = []
    for name, allowed in _ranges(rates, identity, peak_read_bytes_per_s).items():
        value = rates.get(name)
        if value is not None and not allowed.low <= value <= allowed.high:
            found.append(f"{name} {value:.4g} is outside {allowed.low:.4g} .. {allowed.high:.4g}: {allowed.why}")
    return found + _disorder(rates)


def _ranges(rates: Mapping[str, float], identity: Mapping[str, object], peak: float) -> dict[str, Range]:
    sms, clock = float(str(identity["sm_count"])), rates.get("sm_clock_hz", 0.0)
    read = rates.get("read_bytes_per_s", 0.0)
    ranges = {
        "dram_latency_s": Range(low=0.35e-6, high=1.2e-6, why="loaded DRAM latency of every GPU measured so far"),
        "graph_node_s": Range(low=0.4e-6, high=4e-6, why="a kernel inside a graph"),
        "stream_launch_s": Range(low=0.4e-6, high=6e-6, why="a kernel queued on a stream"),
        "l2_bytes_per_s": Range(low=1.1 * read, high=20 * max(read, 1.0), why="L2 is faster than DRAM"),
    }
    if peak:
        why = f"share of the {peak / 1e9:.0f} GB/s that bus width and memory clock give"
        ranges["read_bytes_per_s"] = Range(low=0.80 * peak, high=0.99 * peak, why=why)
        ranges["copy_bytes_per_s"] = Range(low=0.70 * peak, high=0.99 * peak, why=why)
    if clock:
        sfu = float(str(identity.get("sfu_per_clock_sm", 16))) * sms * clock
        ranges["exp_per_s"] = Range(low=0.9 * sfu, high=1.1 * sfu, why="special-function units x measured clock")
        per_clock = float(str(identity.get("matrix_flop_per_clock_sm", 0)))
        if per_clock:
            top = per_clock * sms * clock
            why = "matrix FLOP a clock x measured clock"
            ranges["bf16_matrix_flops"] = Range(low=0.55 * top, high=1.02 * top, why=why)
    return ranges


def _disorder(rates: Mapping[str, float]) -> list[str]:
    """Latencies rise from level to level."""
    levels = ("l1_latency_s", "l2_latency_s", "l2_far_latency_s", "idle_dram_latency_s")
    order = [name for name in levels if name in rates]
    return [
        f"{far} {rates[far]:.3g} s is below {near} {rates[near]:.3g} s"
        for near, far in itertools.pairwise(order)
        if rates[far] < rates[near]
    ]
