"""Measure whether a device is idle. For a CPU: how many of the usable cores other work keeps busy. For a GPU: its share
of busy time, from NVML. The daemon's own work is excluded.

The load average would count the daemon's tuning for a minute after its end; two readings of the kernel's CPU times do
not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OVER_S = 5.0  # time over which readings are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """Hold CPU time since boot, in seconds: of all work on the usable cores, and of the daemon's own processes."""

    at_s: float
    busy_s: float
    own_s: float


def others(before: CpuReading, now: CpuReading) -> float:
    """Return the number of cores that other work kept busy between two readings."""
    elapsed = now.at_s - before.at_s
    if elapsed <= 0:
        return 0.0
    own = max(0.0, now.own_s - before.own_s)  # a child that ended takes its time with it
    return max(0.0, (now.busy_s - before.busy_s - own) / elapsed)


class BusyMeter:
    """Average the cores that other work keeps busy (`busy`) over about OVER_S. Starts as if all were busy."""

    def __init__(self, *, cores: int | None = None) -> None:
        self.busy = float(cores or len(os.sched_getaffinity(0)))
        self._last: CpuReading | None = None

    def take(self, reading: CpuReading) -> float:
        if self._last is not None:
            found = others(self._last, reading)
            self.busy += _share(self._last.at_s, reading.at_s) * (found - self.busy)
        self._last = reading
        return self.busy

    def look(self, at_s: float) -> float:
        """Take a reading now."""
        return self.take(read(at_s))

    def why(self, limit: float) -> str:
        """Return why no tune may run now; "" if the device is idle."""
        return f"other work keeps {self.busy:.1f} cores busy (limit {limit:g})" if self.busy > limit else ""


class GpuMeter:
    """Average the share of time that others use a GPU (`busy`). Starts as if fully busy."""

    LIMIT = 0.05

    def __init__(self, name: str, uuid: str, *, ask: Callable[[str], Utilisation] | None = None):
        self.name, self.uuid, self._ask = name, uuid, ask or utilisation
        self.busy = 1.0
        self._last_s: float | None = None

    def look(self, at_s: float) -> float:
        found = self._ask(self.uuid).others({process.pid for process in _family()})
        if self._last_s is not None:
            self.busy += _share(self._last_s, at_s) * (found - self.busy)
        self._last_s = at_s
        return self.busy

    def why(self, limit: float) -> str:
        """`limit` is the CPU's; a GPU has a separate one."""
        return f"other work keeps {self.name} busy {self.busy:.0%} of the time" if self.busy > self.LIMIT else ""


def _share(before_s: float, now_s: float) -> float:
    return min(1.0, max(0.0, now_s - before_s) / OVER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Hold NVML's utilisation: the share of time in which any kernel ran (None if unknown), the processes that use the
    device, and the share of each if known."""

    total: float | None
    pids: frozenset[int]
    shares: dict[int, float]

    def others(self, own: Collection[int]) -> float:
        """Return the share of other processes. If NVML cannot tell the daemon's from others (a container has its own
        process numbers) and the daemon's run on it, the total tells nothing."""
        foreign = self.pids - set(own)
        if self.shares:
            return min(1.0, sum(share for pid, share in self.shares.items() if pid in foreign))
        if not foreign:
            return 0.0
        return 1.0 if self.total is None else self.total


def utilisation(uuid: str, nvml: Any = None) -> Utilisation:
    """Read the utilisation now. A device for which NVML does not answer counts as busy."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return _ALL
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        pids = frozenset(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        total = _told(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        shares = _told(nvml, lambda: _latest(nvml.nvmlDeviceGetProcessUtilization(handle, 0)))
        return Utilisation(total=total, pids=pids, shares=shares or {})
    except nvml.NVMLError:
        return _ALL
    finally:
        nvml.nvmlShutdown()


_ALL = Utilisation(total=1.0, pids=frozenset({0}), shares={})


def _told(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return None if this device or driver reports no utilisation (a MIG slice has none)."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
        return None


def _latest(samples: Iterable[Any]) -> dict[int, float]:
    """Return the last sample of each process."""
    ordered = sorted(samples, key=lambda s: s.timeStamp)
    return {int(s.pid): s.smUtil / 100 for s in ordered}


def _family() -> list[Any]:
    """Return this process and all its descendants, as psutil's."""
    import psutil

    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def read(at_s: float) -> CpuReading:
    return CpuReading(at_s=at_s, busy_s=_busy(), own_s=_own())


def _busy() -> float:
    cores = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    total = 0
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        name, *fields = line.split()
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[:8])
            total += user + nice + system + irq + softirq + steal
    return total / TICKS_PER_S


def _own() -> float:
    """Return the CPU time of this process, its descendants, and the descendants that have ended."""
    import psutil

    total = 0.0
    for process in _family():
        with suppress(psutil.Error):  # it has ended since
            t = process.cpu_times()
            total += t.user + t.system + t.children_user + t.children_system
    return total
