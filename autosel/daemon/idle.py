"""Is the device idle? On a CPU: how many of our cores others keep busy, what we ourselves run counted out.

The load average would count our own tuning for a minute after it ended; the kernel's CPU times, read twice, do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
            share = min(1.0, (reading.at_s - self._last.at_s) / self.over_s)
            self.busy += share * (found - self.busy)
        self._last = reading
        return self.busy


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
