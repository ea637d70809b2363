"""Measure the CPU time that other processes and other guests take between two readings of /proc.

    before = read()
    ...
    found = between(before, read())      # Neighbours: cores kept busy, share stolen, who

The load average would count autosel's own work for a minute after its end; two readings of CPU times do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autosel.devices.cpu.machine import ROOT

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NAMED = 3  # processes that are named
LEAST_NAMED = 0.05  # cores that a process must have kept busy to be named


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Hold CPU time in seconds; `ended_s` is the time of its children that have ended."""

    parent: int
    name: str
    used_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Hold CPU time since boot, summed over CPUs, in seconds. Without /proc there are no CPUs and no processes."""

    at_s: float
    cpus: int
    idle_s: float
    stolen_s: float
    processes: Mapping[int, Process]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """`cores` that other processes kept busy, the share of CPU time `stolen` by the hypervisor, and `by` whom."""

    cores: float = 0.0
    stolen: float = 0.0
    by: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """`cc1plus 0.9 cores, other guests 12 % of CPU time`; empty on a quiet machine."""
        told = list(self.by) or ([f"other processes {self.cores:.1f} cores"] if self.cores > LEAST_NAMED else [])
        told += [f"other guests {self.stolen:.0%} of CPU time".replace("%", " %")] if self.stolen >= 0.01 else []
        return ", ".join(told)


def read(root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> Reading:
    """Read now. About 2 ms for a hundred processes."""
    cpus, idle_s, stolen_s = _cpu_times(root)
    return Reading(
        at_s=clock(), cpus=cpus, idle_s=idle_s, stolen_s=stolen_s, processes=dict(_processes(root)) if cpus else {}
    )


def between(before: Reading, now: Reading, own: int = 0) -> Neighbours:
    """Return what others took; `own` (default: this process) and all its descendants do not count."""
    elapsed = now.at_s - before.at_s
    if elapsed <= 0 or not now.cpus:
        return Neighbours()
    ours = _family(before, now, own or os.getpid())
    stolen_s = max(0.0, now.stolen_s - before.stolen_s)
    busy_s = elapsed * now.cpus - (now.idle_s - before.idle_s) - stolen_s
    own_s = sum(_used(before, now, pid) for pid in ours)
    return Neighbours(
        cores=max(0.0, (busy_s - own_s) / elapsed),
        stolen=min(1.0, stolen_s / (elapsed * now.cpus)),
        by=_named(before, now, ours, elapsed),
    )


def _named(before: Reading, now: Reading, ours: frozenset[int], elapsed: float) -> tuple[str, ...]:
    """Group processes of one name."""
    cores: dict[str, float] = {}
    for pid, process in now.processes.items():
        if pid not in ours:
            earlier = _earlier(before, now, pid)
            used_s = process.used_s - (earlier.used_s if earlier else 0.0)
            cores[process.name] = cores.get(process.name, 0.0) + used_s / elapsed
    most = sorted(cores, key=lambda name: -cores[name])[:NAMED]
    return tuple(f"{name} {cores[name]:.1f} cores" for name in most if cores[name] > LEAST_NAMED)


def _used(before: Reading, now: Reading, pid: int) -> float:
    """Return the CPU time of a process between the readings, and of its children that ended in between."""
    process, earlier = now.processes.get(pid), _earlier(before, now, pid)
    if process is None:
        return 0.0  # it has ended: its parent's count has grown by all it used
    total = process.used_s + process.ended_s
    if earlier is not None:
        total -= earlier.used_s + earlier.ended_s
    # Time that an ended child used before the first reading is in this count now, and was in the child's then.
    gone = [p for n, p in before.processes.items() if p.parent == pid and n not in now.processes]
    return max(0.0, total - sum(p.used_s + p.ended_s for p in gone))


def _earlier(before: Reading, now: Reading, pid: int) -> Process | None:
    """Return the same process at the first reading; None if it is new, or if another process had its number."""
    found, process = before.processes.get(pid), now.processes.get(pid)
    return found if found is not None and process is not None and found.used_s <= process.used_s else None


def _family(before: Reading, now: Reading, root: int) -> frozenset[int]:
    """Return a process and all its descendants, ended ones too."""
    parents = {pid: process.parent for r in (before, now) for pid, process in r.processes.items()}
    found, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return frozenset(found)


# --- /proc -----------------------------------------------------------------------------------------------------------


def _cpu_times(root: Path) -> tuple[int, float, float]:
    """Return (CPUs, idle and iowait seconds, stolen seconds) of /proc/stat; no CPUs without that file."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
        fields = [int(f) for f in lines[0].split()[1:9]]  # user nice system idle iowait irq softirq steal
    except (OSError, IndexError, ValueError):
        return 0, 0.0, 0.0
    cpus = sum(line.startswith("cpu") for line in lines[1:])
    stolen = fields[7] if len(fields) > 7 else 0
    return cpus, sum(fields[3:5]) / TICKS_PER_S, stolen / TICKS_PER_S


def _processes(root: Path) -> Iterator[tuple[int, Process]]:
    try:
        names = [entry.name for entry in (root / "proc").iterdir()]
    except OSError:
        return
    for name in names:
        if name.isdecimal() and (found := _process(root / "proc" / name / "stat")) is not None:
            yield int(name), found


def _process(path: Path) -> Process | None:
    """Return None for a process that has just ended. Its name, in parentheses, may contain anything."""
    try:
        head, _, rest = path.read_text(errors="replace").rpartition(")")
        fields = rest.split()
        user, system, ended_user, ended_system = (int(f) / TICKS_PER_S for f in fields[11:15])
        return Process(
            parent=int(fields[1]),
            name=_plain(head.partition("(")[2]),
            used_s=user + system,
            ended_s=ended_user + ended_system,
        )
    except (OSError, IndexError, ValueError):
        return None


def _plain(name: str) -> str:
    return "".join(c for c in name if c.isprintable()) or "?"
