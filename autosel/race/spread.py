"""Threads on cores of their own for a while.

Beside other work the scheduler often puts two threads of a pool on one core, where each waits for the other at the
barrier, and leaves them there: with one competing process on two cores no sample of a parallel call was clean in four
seconds, and 200 a second were with each thread on a core of its own, as on an idle machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class Spread:
    """Binds threads until `release`. Does nothing where there are fewer cores than threads."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """`cpus`: one of each core that may be used."""
        self._cpus = tuple(cpus)
        self._before: dict[int, set[int]] = {}  # affinities of the threads that are bound

    def place(self, threads: Sequence[int]) -> None:
        """Bind each thread to a core. One that is bound to one CPU already stays there."""
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
        """Give the threads back the affinities that they had."""
        for thread, cpus in self._before.items():
            _bind(thread, cpus)
        self._before.clear()


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:  # it has ended
        return set()


def _bind(thread: int, cpus: set[int]) -> bool:
    try:
        os.sched_setaffinity(thread, cpus)
    except OSError:
        return False
    return True
