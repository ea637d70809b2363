"""Has every other thread of this process gone to sleep?

A parallel runtime leaves its threads spinning after a region, in wait for the next one: libgomp's for some
milliseconds. On a machine whose every core is in use they take the next arm's core for a whole scheduler slice (seen:
4 of 5 ms, in one sample of ten, always charged to the arm that follows PyTorch). A clock does not show them: the kernel
adds up the CPU time of a thread that runs elsewhere only at its ticks, every 1 to 10 ms. Its state does.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

# An active wait policy never sleeps; then its neighbours race beside it, as they would in service.
LIMIT_NS = 30_000_000
LOOK_NS = 50_000  # between two looks: a look reads a file a thread
_TASKS = Path("/proc/self/task")


def wait_until_idle(limit_ns: int = LIMIT_NS) -> bool:
    """Wait until no other thread of this process runs; False where one still did at the limit.

    Where the system has no /proc there is nothing to see: returns at once.
    """
    deadline = time.perf_counter_ns() + limit_ns
    while others_run():
        now = time.perf_counter_ns()
        if now > deadline:
            return False
        while time.perf_counter_ns() < now + LOOK_NS:  # a sleep would let this core's clock drop
            pass
    return True


def others_run() -> bool:
    """Does any other thread of this process run, or wait for a core?"""
    own = str(threading.get_native_id())
    try:
        return any(_state(task) == "R" for task in _TASKS.iterdir() if task.name != own)
    except OSError:
        return False


def _state(task: Path) -> str:
    """One letter: R runs or waits for a core; its name, in parentheses, may hold anything."""
    try:
        return chr((task / "stat").read_bytes().rpartition(b")")[2].split()[0][0])
    except (OSError, IndexError):  # it has just ended
        return "X"
