"""Do a device's stored rates still hold? Two of them are looked at again, three times, in a tenth of a second.

What starts work and what reads memory stand for all rates: a neighbour, another clock or another driver moves them. A
rate has moved if it is off by more than 7 % in every look.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autosel.fingerprint import machine, nvml, probe
from autosel.values import Fingerprint, Rate

DRIFT_LIMIT = 0.07  # of a rate, three looks in a row
LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Today's rates against those stored: ratios above 1 are better than stored."""

    read: float
    start: float
    what: str  # `start` is the speed of, in words
    moved: bool  # one of them off by more than the limit in every look
    shared: bool  # others use the device too, or it is slowed: then a drift says who was running, not what it is
    seconds: float

    @property
    def reason(self) -> str:
        return f"read rate {self.read:.2f}x and {self.what} speed {self.start:.2f}x of what is stored"


def drifted(fp: Fingerprint, device: str = "cpu", *, seconds: float = 0.1) -> Drift:
    """A probe of the device `fp` is of, which `take` calls `device`. `seconds`: how long to look at a CPU; a GPU takes
    about as long, and the time before that its clocks need (0.3 s), and cupy.

    Raises BuildError: no compiler for a CPU's probes; UsageError as `take` does.
    """
    return _gpu(fp, device) if fp.kind == "cuda" else _cpu(fp, seconds)


# --- a CPU -----------------------------------------------------------------------------------------------------------


def _cpu(fp: Fingerprint, seconds: float) -> Drift:
    started = time.monotonic()
    cpus = int(fp.identity["cpus"])
    read, join = fp.rates.get(f"read_bytes_per_s@{cpus}"), fp.rates.get(f"fork_join_s@{cpus}")
    reads, joins = [], []
    for _ in range(LOOKS):
        reads.append(_look_read(read, cpus, 0.7 * seconds / LOOKS))
        joins.append(_look_join(join, cpus, 0.3 * seconds / LOOKS))
    # The fork-join's windows are short and its floor is sharp, but a helper that fell asleep costs 50 us: only times
    # twice as long in every look count.
    moved = _off(reads) or all(j < 0.5 for j in joins)
    return Drift(
        read=max(reads),
        start=max(joins),
        what="fork-join",
        moved=moved,
        shared=is_shared(fp),
        seconds=time.monotonic() - started,
    )


def _look_read(stored: Rate | None, cpus: int, seconds: float) -> float:
    return _quantile(probe.load().read(cpus, seconds), "B/s") / stored.value if stored and _native(stored) else 1.0


def _look_join(stored: Rate | None, cpus: int, seconds: float) -> float:
    if stored is None:
        return 1.0
    return stored.value / _quantile(probe.load().windows("fork_join", cpus, seconds=seconds), "s")


def _native(rate: Rate) -> bool:
    return probe.SOURCE in rate.source


def _quantile(figures: list[float], unit: str) -> float:
    return probe.summary(figures, unit, "").value


def is_shared(fp: Fingerprint) -> bool:
    """A virtual machine, a quota, or an affinity that leaves cores to others."""
    identity = fp.identity
    whole = identity["cpus"] + identity.get("slow_cores", 0) >= identity["cores"]
    return machine.is_virtual() or identity["quota_cpus"] is not None or not whole


# --- a GPU -----------------------------------------------------------------------------------------------------------


def _gpu(fp: Fingerprint, device: str) -> Drift:
    """Stored rates are the best of many windows, those of a look the best of a few: that costs well below the limit. A
    device that others use is not looked at: it would say nothing, and cost them half a second."""
    started, ordinal = time.monotonic(), int(device.partition(":")[2] or 0)
    uuid, what = nvml.read(ordinal).uuid, "graph node"
    if nvml.is_shared(uuid):
        return Drift(read=1.0, start=1.0, what=what, moved=False, shared=True, seconds=time.monotonic() - started)
    from autosel.fingerprint import gpu_probe

    found = gpu_probe.looks(ordinal, LOOKS)
    read, node = fp.rates.get("read_bytes_per_s"), fp.rates.get("graph_node_s")
    reads = [look.read_bytes_per_s / read.value if read else 1.0 for look in found]
    nodes = [node.value / look.graph_node_s if node else 1.0 for look in found]
    return Drift(
        read=max(reads),
        start=max(nodes),
        what=what,
        moved=_off(reads) or _off(nodes),
        shared=nvml.is_shared(uuid) or bool(nvml.slowdown(uuid)),
        seconds=time.monotonic() - started,
    )


def _off(ratios: list[float]) -> bool:
    return all(abs(r - 1) > DRIFT_LIMIT for r in ratios)
