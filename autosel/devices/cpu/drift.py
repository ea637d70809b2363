"""Check whether the CPU's stored rates still hold, by measuring two of them three times in a tenth of a second.

The start of a kernel and the read rate stand in for all rates: a neighbour or another clock changes them.
"""

from __future__ import annotations

import time

from autosel.devices.cpu import machine, probe
from autosel.devices.device import LOOKS, Drift, off
from autosel.values import Fingerprint, Rate


def drifted(fp: Fingerprint, seconds: float) -> Drift:
    started = time.monotonic()
    cpus = fp.cpus
    read, join = fp.rates.get(f"read_bytes_per_s@{cpus}"), fp.rates.get(f"fork_join_s@{cpus}")
    reads, joins = [], []
    for _ in range(LOOKS):
        reads.append(_look_read(read, cpus, 0.7 * seconds / LOOKS))
        joins.append(_look_join(join, cpus, 0.3 * seconds / LOOKS))
    # The fork-join's windows are short and its minimum is sharp, but a helper that fell asleep costs 50 us, so only
    # times twice as long in every measurement count.
    moved = off(reads) or all(j < 0.5 for j in joins)
    return Drift(
        read=max(reads),
        start=max(joins),
        what="fork-join",
        moved=moved,
        shared=is_shared(fp),
        seconds=time.monotonic() - started,
    )


def _look_read(stored: Rate | None, cpus: int, seconds: float) -> float:
    if stored is None or probe.SOURCE not in stored.source:
        return 1.0
    return _quantile(probe.load().read(cpus, seconds), "B/s") / stored.value


def _look_join(stored: Rate | None, cpus: int, seconds: float) -> float:
    if stored is None:
        return 1.0
    return stored.value / _quantile(probe.load().windows("fork_join", cpus, seconds=seconds), "s")


def _quantile(figures: list[float], unit: str) -> float:
    return probe.summary(figures, unit, "").value


def is_shared(fp: Fingerprint) -> bool:
    """Return True for a virtual machine, a quota, or an affinity that leaves cores to others."""
    identity = fp.identity
    whole = fp.cpus + identity.get("slow_cores", 0) >= identity["cores"]
    return machine.is_virtual() or identity["quota_cpus"] is not None or not whole
