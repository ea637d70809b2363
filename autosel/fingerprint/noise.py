"""Was anything else running while we measured? The reasons, in words; an empty tuple is a quiet machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autosel.fingerprint.machine import ROOT
from autosel.values import Rate

STEAL_LIMIT = 0.02  # of CPU time, taken by the hypervisor for other guests
# (p90 - p10) / median of the read windows. Alone on a 2-vCPU cloud machine it was 0.09 in several runs; with one other
# busy process 0.7 to 1.3. Anything between would do.
SPREAD_LIMIT = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """CPU time since boot, in clock ticks, summed over CPUs."""

    total: int
    stolen: int


def ticks(root: Path = ROOT) -> Ticks:
    """From /proc/stat; zeros where there is none."""
    try:
        first = (root / "proc/stat").read_text().splitlines()[0].split()
        fields = [int(f) for f in first[1:9]]  # user nice system idle iowait irq softirq steal; guest time is in user
    except (OSError, IndexError, ValueError):
        return Ticks(total=0, stolen=0)
    return Ticks(total=sum(fields), stolen=fields[7] if len(fields) > 7 else 0)


def load_average(root: Path = ROOT) -> float:
    """Runnable tasks over the last minute, of the whole machine; 0 where unknown."""
    try:
        return float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return 0.0


def reasons(*, load: float, cores: int, before: Ticks, after: Ticks, rates: Mapping[str, Rate]) -> tuple[str, ...]:
    """Why a measurement is contended: `load` was read before it began, so that its own work does not count."""
    found = []
    if load > cores / 2:
        found.append(f"load average {load:.2f} on {cores} cores (limit: half of them)")
    elapsed = after.total - before.total
    if elapsed > 0 and (after.stolen - before.stolen) / elapsed > STEAL_LIMIT:
        share = 100 * (after.stolen - before.stolen) / elapsed
        found.append(f"{share:.1f} % of CPU time went to other guests (limit: {100 * STEAL_LIMIT:.0f} %)")
    spreads = {name: r.spread for name, r in rates.items() if name.startswith("read_bytes_per_s@")}
    if spreads and max(spreads.values()) > SPREAD_LIMIT:
        worst = max(spreads, key=lambda name: spreads[name])
        found.append(f"windows of {worst} spread by {100 * spreads[worst]:.0f} % (limit: {100 * SPREAD_LIMIT:.0f} %)")
    return tuple(found)
