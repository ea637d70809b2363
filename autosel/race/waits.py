"""Samples during which no thread of this process waited for a core that another process used.

A parallel call ends when its last thread does. If other processes use the cores, one of its threads may be ready to run
and not running: the call then takes the length of their time slices, which says nothing about the kernel. The system
counts these waits for each thread (`/proc/self/task/N/schedstat`, second field, nanoseconds). `Watch` compares the sum
before and after a sample, and takes the sample again if it has grown.

A process with more running threads than cores makes its own threads wait, and that is part of its time. Therefore
waits count only while processes of others use CPU time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autosel.devices.cpu import machine
from autosel.devices.device import READ_S
from autosel.race.realtime import RealTime
from autosel.race.spread import ThreadPlacement

PROC = Path("/proc")
TOLERATED = 0.01  # of a sample: a wait this long changes it by at most half of the smallest margin
MOST_LOST_NS = 2_000_000_000  # most time of repeated samples in one visit
RUNS = 0.2  # of the CPU time of the thread that runs most: a thread that runs less is not in the pool
WINDOW_S = 0.5  # over which CPU time of others is summed
OTHERS_S = 0.02  # of CPU time in a window: two ticks of /proc/stat, its resolution
PROBES = 8  # of three milliseconds
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Result = TypeVar("Result")


class Waits:
    """The run-queue waits of this process's threads. `watched` is False if the system does not count them."""

    def __init__(self, proc: Path = PROC) -> None:
        self._tasks = proc / "self" / "task"
        self._descriptors: dict[str, int] = {}
        self.renew()
        self.watched = bool(self._descriptors)

    def renew(self) -> None:
        """Follow the present threads."""
        try:
            threads = [task.name for task in self._tasks.iterdir()]
        except OSError:
            return
        for gone in self._descriptors.keys() - set(threads):
            os.close(self._descriptors.pop(gone))
        for thread in threads:
            if thread not in self._descriptors and (opened := _opened(self._tasks / thread / "schedstat")) is not None:
                self._descriptors[thread] = opened

    def total_ns(self) -> int:
        """Return the sum over all followed threads. Takes about 1.3 us per thread."""
        return sum(_counter(descriptor, 1) for descriptor in self._descriptors.values())

    def ran_ns(self) -> dict[int, int]:
        """Return the CPU time of each thread."""
        return {int(thread): _counter(descriptor, 0) for thread, descriptor in self._descriptors.items()}

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the thread has just ended, or the system has no such file
        return None


def _counter(descriptor: int, column: int) -> int:
    try:
        return int(os.pread(descriptor, 80, 0).split()[column])
    except (OSError, IndexError, ValueError):  # the thread has ended
        return 0


class Others:
    """CPU time of other processes. `owner` is the process that requests our samples: its time counts as ours."""

    def __init__(self, owner: int = 0, proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat = proc / "stat"
        self._owner = proc / str(owner) / "stat" if owner else None
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque()  # (when, CPU time of others until then)

    def look(self) -> float:
        """Return CPU time of others since the beginning of the window, in seconds."""
        now, used = self._clock(), self._used_s()
        self._seen.append((now, used))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        return used - self._seen[0][1]

    def run(self) -> bool:
        """Return True if other processes used CPU time in the window."""
        return self.look() > OTHERS_S

    def _used_s(self) -> float:
        """Return CPU time of others: idle time is exact and busy time is sampled, so it is all that is neither idle nor
        ours.
        """
        try:
            fields = [int(f) for f in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0.0
        idle_s = (fields[3] + fields[4] + sum(fields[7:8])) / TICKS_PER_S  # steal belongs to the hypervisor
        return self._clock() * (os.cpu_count() or 1) - idle_s - time.process_time() - self._owner_s()

    def _owner_s(self) -> float:
        if self._owner is None:
            return 0.0
        try:
            fields = self._owner.read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        except (OSError, IndexError, ValueError):
            return 0.0


@dataclass(slots=True, kw_only=True)
class WaitWatch:
    """Repeats samples during which a thread waited for a core. `again` counts them."""

    waits: Waits
    others: Others
    spread: ThreadPlacement
    realtime: RealTime | None = None  # None: not requested
    clock: Callable[[], int] = time.perf_counter_ns
    again: int = 0
    _ran: dict[int, int] = field(default_factory=dict)  # CPU time of each thread before the visits

    def begin(self) -> None:
        """Record the present state, before the visits of a pair."""
        self.waits.renew()
        self._ran = self.waits.ran_ns()
        self.others.look()

    def samples(self, sample: Callable[[], float], count: int, settle: Callable[[], object]) -> list[float]:
        """Take `count` samples; fewer if too much time was lost.

        `settle` is called before a sample is repeated. The repetition starts at once, because the threads that have
        just run may use the rest of their time slices.
        """
        found: list[float] = []
        lost_ns = 0
        while len(found) < count and lost_ns < MOST_LOST_NS:
            taken, disturbed_ns = self.once(sample)
            if not disturbed_ns:
                found.append(taken)
                continue
            self.again += 1
            lost_ns += disturbed_ns
            self._favour(self._pool())
            settle()
        self._let_go()
        return found

    def once(self, sample: Callable[[], Result]) -> tuple[Result, int]:
        """Return a sample, and how many nanoseconds it took if a thread waited for a core that others used, else 0."""
        began, waited = self.clock(), self.waits.total_ns()
        taken = sample()
        waited, spent = self.waits.total_ns() - waited, self.clock() - began
        return taken, spent if waited > TOLERATED * spent and self.others.run() else 0

    def _favour(self, threads: Sequence[int]) -> None:
        self.spread.place(threads)
        if self.realtime is not None:
            self.realtime.place(threads)

    def _let_go(self) -> None:
        if self.realtime is not None:
            self.realtime.release()
        self.spread.release()

    def _pool(self) -> list[int]:
        """Return the threads that have run since the visits began."""
        ran = {thread: ns - self._ran.get(thread, ns) for thread, ns in self.waits.ran_ns().items()}
        return [thread for thread, ns in ran.items() if ns > RUNS * max(ran.values())]


def read_rate(windows: Callable[[float], Sequence[float]], waits: WaitWatch | None) -> float:
    """Return the best read rate of memory now, in bytes/s: of short probes during which no thread waited for a core.

    If a thread waited in each of them, of one long probe. `windows` takes seconds (0: the shortest probe) and returns
    rates.
    """
    clean: list[float] = []
    if waits is not None:
        waits.begin()
        clean = waits.samples(lambda: max(windows(0.0)), PROBES, lambda: None)
    return max(clean or windows(READ_S))


def watch(owner: int = 0, *, realtime: bool = False) -> WaitWatch:
    """Return a watch over this process. `realtime`: samples are repeated at real-time priority."""
    raised = RealTime() if realtime else None
    return WaitWatch(
        waits=Waits(), others=Others(owner), spread=ThreadPlacement(machine.usable_cpus()), realtime=raised
    )
