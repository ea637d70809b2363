"""Check whether a device's stored rates still hold, by measuring two of them three times in a tenth of a second.

The start of a kernel and the read rate stand in for all rates: a neighbour, another clock or another driver changes
them. A rate has moved if all three measurements are off by more than 7 %.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autosel.fingerprint import machine, nvml, probe
from autosel.values import Fingerprint, Rate

DRIFT_LIMIT = 0.07  # of a rate, in three measurements in a row
LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Compare today's rates with the stored ones: ratios above 1 are better than stored."""

    read: float
    start: float
    what: str  # what `start` measures, in words
    moved: bool  # one of them off by more than the limit in every measurement
    shared: bool  # others use the device too, or it is throttled: then a drift depends on them, not on the device
    seconds: float

    @property
    def reason(self) -> str:
        return f"read rate {self.read:.2f}x and {self.what} speed {self.start:.2f}x of the stored rate"


def drifted(fp: Fingerprint, device: str = "cpu", *, seconds: float = 0.1) -> Drift:
    """Check the rates of the device with fingerprint `fp`, which `take` calls `device`. `seconds`: duration for a CPU;
    a GPU takes about as long, plus 0.3 s for its clocks, and needs cupy.

    Raises BuildError without a compiler for a CPU's probes; UsageError as `take` does.
    """
    return _gpu(fp, device) if fp.kind == "cuda" else _cpu(fp, seconds)


# --- a CPU -----------------------------------------------------------------------------------------------------------


def _cpu(fp: Fingerprint, seconds: float) -> Drift:
    started = time.monotonic()
    cpus = fp.cpus
    read, join = fp.rates.get(f"read_bytes_per_s@{cpus}"), fp.rates.get(f"fork_join_s@{cpus}")
    reads, joins = [], []
    for _ in range(LOOKS):
        reads.append(_look_read(read, cpus, 0.7 * seconds / LOOKS))
        joins.append(_look_join(join, cpus, 0.3 * seconds / LOOKS))
    # The fork-join's windows are short and its minimum is sharp, but a helper that fell asleep costs 50 us, so only
    # times twice as long in every measurement count.
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
    """Return True for a virtual machine, a quota, or an affinity that leaves cores to others."""
    identity = fp.identity
    whole = fp.cpus + identity.get("slow_cores", 0) >= identity["cores"]
    return machine.is_virtual() or identity["quota_cpus"] is not None or not whole


# --- a GPU -----------------------------------------------------------------------------------------------------------


def _gpu(fp: Fingerprint, device: str) -> Drift:
    """Check a GPU. Stored rates are the best of many windows, these the best of a few, which differs by well below the
    limit. A device with other users is not measured: the result would be useless, and the measurement costs them half a
    second."""
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
