"""Is a device idle? Of a CPU: how many of our cores others keep busy; of a GPU: which share of the time it is at work,
as NVML says. What we ourselves run is counted out.

The load average would count our own tuning for a minute after it ended; the kernel's CPU times, read twice, do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """CPU time since boot, in seconds: of all work on our cores, and of the processes that are ours."""

    at_s: float
    busy_s: float
    own_s: float


def others(before: Reading, now: Reading) -> float:
    """Cores that work of others kept busy between two readings."""
    elapsed = now.at_s - before.at_s
    if elapsed <= 0:
        return 0.0
    own = max(0.0, now.own_s - before.own_s)  # a child that ended takes its time with it
    return max(0.0, (now.busy_s - before.busy_s - own) / elapsed)


class Meter:
    """`busy`: cores that others keep busy, smoothed over about `over_s` seconds. Starts as if all were."""

    def __init__(self, *, over_s: float = 5.0, cores: int | None = None) -> None:
        self.over_s = over_s
        self.busy = float(cores or len(os.sched_getaffinity(0)))
        self._last: Reading | None = None

    def take(self, reading: Reading) -> float:
        if self._last is not None:
            found = others(self._last, reading)
            self.busy += _share(self._last.at_s, reading.at_s, self.over_s) * (found - self.busy)
        self._last = reading
        return self.busy

    def look(self, at_s: float) -> float:
        """The same of this moment."""
        return self.take(read(at_s, [os.getpid()]))

    def why(self, limit: float) -> str:
        """Why nothing is tuned now; "" where the device is idle."""
        return f"other work keeps {self.busy:.1f} cores busy (limit {limit:g})" if self.busy > limit else ""


class GpuMeter:
    """`busy`: the share of the time that others keep a GPU at work, smoothed alike. Starts as if all of it."""

    LIMIT = 0.05

    def __init__(self, name: str, uuid: str, *, over_s: float = 5.0, ask: Callable[[str], Utilisation] | None = None):
        self.name, self.uuid, self.over_s, self._ask = name, uuid, over_s, ask or utilisation
        self.busy = 1.0
        self._last_s: float | None = None

    def look(self, at_s: float) -> float:
        found = self._ask(self.uuid).others(_family(os.getpid()))
        if self._last_s is not None:
            self.busy += _share(self._last_s, at_s, self.over_s) * (found - self.busy)
        self._last_s = at_s
        return self.busy

    def why(self, limit: float) -> str:
        """`limit` is the CPU's; this has its own."""
        return f"other work keeps {self.name} busy {self.busy:.0%} of the time" if self.busy > self.LIMIT else ""


def _share(before_s: float, now_s: float, over_s: float) -> float:
    return min(1.0, max(0.0, now_s - before_s) / over_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """What NVML says of a device: the share of the time in which any kernel ran (None: it does not say), which
    processes use it, and the share of each where it is told apart."""

    total: float | None
    pids: frozenset[int]
    shares: dict[int, float]

    def others(self, own: Collection[int]) -> float:
        """The share of processes that are not ours. Where ours cannot be told from others (a container has numbers of
        its own) and we run there, nothing follows from the total."""
        foreign = self.pids - set(own)
        if self.shares:
            return min(1.0, sum(share for pid, share in self.shares.items() if pid in foreign))
        if not foreign:
            return 0.0
        return 1.0 if self.total is None else self.total


def utilisation(uuid: str, nvml: Any = None) -> Utilisation:
    """Now. A device that NVML does not answer for is taken to be busy."""
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
    """None where this device or driver does not say (a MIG slice has no utilisation of its own)."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
        return None


def _latest(samples: Iterable[Any]) -> dict[int, float]:
    """By process, the last of its samples."""
    ordered = sorted(samples, key=lambda s: s.timeStamp)
    return {int(s.pid): s.smUtil / 100 for s in ordered}


def _family(pid: int) -> frozenset[int]:
    """A process and all it started."""
    import psutil

    try:
        root = psutil.Process(pid)
        return frozenset({pid, *(child.pid for child in root.children(recursive=True))})
    except psutil.Error:
        return frozenset({pid})


def read(at_s: float, trees: Iterable[int], proc: Path = Path("/proc")) -> Reading:
    """Now: `trees` are processes of ours, each with all it started."""
    return Reading(at_s=at_s, busy_s=_busy(proc), own_s=sum(_tree(pid) for pid in trees))


def _busy(proc: Path) -> float:
    cores = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    total = 0
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        name, *fields = line.split()
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[:8])
            total += user + nice + system + irq + softirq + steal
    return total / TICKS_PER_S


def _tree(pid: int) -> float:
    """CPU time of a process, of what it started, and of what of that has ended."""
    import psutil

    total = 0.0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    for process in family:
        try:
            t = process.cpu_times()
        except psutil.Error:
            continue
        total += t.user + t.system + t.children_user + t.children_system
    return total


def load_average() -> float:
    return os.getloadavg()[0]
