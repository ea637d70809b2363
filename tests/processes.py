"""Find processes that a nursery and its workers have left behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autosel.workers.guardian import children_of
from autosel.workers.nursery import Nursery


def below(nursery: Nursery) -> list[int]:
    """Return all present guardians and workers of a nursery, and processes that workers have left behind."""
    assert nursery.process is not None, "nothing was forked"
    found, todo = [], [nursery.process.pid]
    while todo:
        todo += (children := children_of(todo.pop()))
        found += [pid for pid in children if lives(pid)]
    return found


def lives(pid: int) -> bool:
    """Return False for a process that has ended and has not been waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
