"""Wait until every other thread of this process sleeps.

A parallel runtime leaves its threads spinning after a region, to be ready for the next one: libgomp's for some
milliseconds. On a machine with all cores in use they take the next arm's core for a whole scheduler slice (measured: 4
of 5 ms, in one sample of ten, always charged to the arm that follows PyTorch). The process's CPU clock does not show
them: the kernel adds up the CPU time of a thread on another core only at its ticks, every 1 to 10 ms. The thread's
state does.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

# With an active wait policy threads never sleep; they then disturb the next arm, as they would in service.
LIMIT_NS = 30_000_000
LOOK_NS = 50_000  # between two checks: each reads one file per thread
_TASKS = Path("/proc/self/task")


def wait_until_idle(limit_ns: int = LIMIT_NS) -> bool:
    """Wait until no other thread of this process runs; return False if one still does at the limit.

    Without /proc it returns at once.
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
    """Return True if any other thread of this process runs or waits for a core."""
    own = str(threading.get_native_id())
    try:
        return any(_state(task) == "R" for task in _TASKS.iterdir() if task.name != own)
    except OSError:
        return False


def _state(task: Path) -> str:
    """Return a thread's state, one letter; R runs or waits for a core. Its name may contain any characters."""
    try:
        return chr((task / "stat").read_bytes().rpartition(b")")[2].split()[0][0])
    except (OSError, IndexError):  # the thread has just ended
        return "X"
