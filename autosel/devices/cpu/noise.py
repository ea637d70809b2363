"""Return the reasons why rates were measured next to other work; an empty tuple means a quiet machine.

The load average does not show it: on an idle machine it is above one core for a minute after a command has ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from autosel.devices.cpu.neighbours import Neighbours
from autosel.values import CONTENDED_CORES, CONTENDED_STEAL, Rate

# (p90 - p10) / median of the read windows. Alone on two cloud machines with 2 cores it was 0.09 to 0.31; with one other
# busy process 0.44 to 1.3. Neighbours on the other side of a hypervisor show here alone.
SPREAD_LIMIT = 0.4


def reasons(found: Neighbours, rates: Mapping[str, Rate]) -> tuple[str, ...]:
    """Return why a measurement is contended. `found`: what others took meanwhile."""
    told = []
    if found.cores > CONTENDED_CORES:
        by = f": {', '.join(found.by)}" if found.by else ""
        told.append(f"other processes kept {found.cores:.1f} cores busy (limit: {CONTENDED_CORES:g}){by}")
    if found.stolen > CONTENDED_STEAL:
        told.append(
            f"{100 * found.stolen:.1f} % of CPU time went to other guests (limit: {100 * CONTENDED_STEAL:.0f} %)"
        )
    spreads = {name: r.spread for name, r in rates.items() if name.startswith("read_bytes_per_s@")}
    if spreads and max(spreads.values()) > SPREAD_LIMIT:
        worst = max(spreads, key=lambda name: spreads[name])
        told.append(f"windows of {worst} spread by {100 * spreads[worst]:.0f} % (limit: {100 * SPREAD_LIMIT:.0f} %)")
    return tuple(told)
