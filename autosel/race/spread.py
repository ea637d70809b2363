"""Bind threads to separate cores for a while.

With other work on the machine, the scheduler often puts two threads of a pool on one core, where each waits for the
other at the barrier, and leaves them there. With one competing process on two cores, no sample of a parallel call was
clean in four seconds; with each thread on a separate core, as on an idle machine, 200 per second were.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class ThreadPlacement:
    """Binds threads until `release`. Does nothing if there are fewer cores than threads."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """Create it for `cpus`: one CPU of each core that may be used."""
        self._cpus = tuple(cpus)
        self._before: dict[int, set[int]] = {}  # affinities of the threads that are bound

    def place(self, threads: Sequence[int]) -> None:
        """Bind each thread to a core. A thread that is already bound to one CPU stays there."""
        if self._before or len(threads) > len(self._cpus) or len(threads) < 2:
            return
        found = {thread: _affinity(thread) for thread in threads}
        taken = {cpu for cpus in found.values() if len(cpus) == 1 for cpu in cpus}
        free = [cpu for cpu in self._cpus if cpu not in taken]
        for thread, cpus in found.items():
            cpu = next((cpu for cpu in free if cpu in cpus), None)
            if len(cpus) > 1 and cpu is not None and _bind(thread, {cpu}):
                free.remove(cpu)
                self._before[thread] = cpus

    def release(self) -> None:
        """Restore the threads' earlier affinities."""
        for thread, cpus in self._before.items():
            _bind(thread, cpus)
        self._before.clear()


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:  # the thread has ended
        return set()


def _bind(thread: int, cpus: set[int]) -> bool:
    try:
        os.sched_setaffinity(thread, cpus)
    except OSError:
        return False
    return True
