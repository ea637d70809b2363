"""Priority over other processes for a race, if the caller requests it and the system allows it: real-time for threads
while samples are repeated and for the thread that asks for them, most of the cores' time for the rest.

A call that needs all cores for longer than a time slice never runs undisturbed while other work runs. At real-time
priority 167 of 171 calls of 16 ms did, with 20 competing processes on two cores, and none of 9 without.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_WEIGHT = -20  # of niceness: 87 times the weight of an ordinary process
AUTOGROUP = Path("/proc/self/autogroup")


class RealTime:
    """Raises threads until `release`."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, os.sched_param]] = {}

    def place(self, threads: Sequence[int]) -> None:
        """Raise the threads above all ordinary processes. Does nothing if the system does not allow it."""
        for thread in threads:
            if thread not in self._before and (before := _raised(thread)) is not None:
                self._before[thread] = before

    def release(self) -> None:
        """Restore the threads' earlier priorities."""
        for thread, (policy, parameter) in self._before.items():
            _set(thread, policy, parameter)
        self._before.clear()


@contextmanager
def raised() -> Iterator[None]:
    """Run this thread at real-time priority, but no process or thread that it starts. For the process that draws inputs
    and judges results between the samples of another. Does nothing if the system does not allow it."""
    here = RealTime()
    here.place([threading.get_native_id()])
    try:
        yield
    finally:
        here.release()


def prefer() -> None:
    """Give this process, and the threads that it starts later, nearly all of the cores' time that others want too.

    A race mostly writes operands. Real-time priority would let no other process run meanwhile; without any priority a
    tune next to eight busy processes decided nothing within 22 minutes (docs/method.md, benchmarks/bench_busy.py).
    Linux may weigh sessions before the processes in them (autogroups), so the session is preferred too if it is this
    process's own. Does nothing if the system does not allow it.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, MOST_WEIGHT)
    with suppress(OSError):
        if os.getsid(0) == os.getpid():
            AUTOGROUP.write_text(str(MOST_WEIGHT))


def allowed() -> bool:
    """Return True if this process may raise its threads."""
    before = _raised(0)
    return before is not None and _set(0, *before)


def _raised(thread: int) -> tuple[int, os.sched_param] | None:
    """Raise a thread; return its earlier priority, None if that is not allowed."""
    try:
        before = os.sched_getscheduler(thread), os.sched_getparam(thread)
    except (OSError, AttributeError):  # it has ended; not Linux
        return None
    # Threads that it starts meanwhile are not raised.
    return before if _set(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1)) else None


def _set(thread: int, policy: int, parameter: os.sched_param) -> bool:
    try:
        os.sched_setscheduler(thread, policy, parameter)
    except OSError:
        return False
    return True
