"""PyTorch on one thread for a while: forking a team for each of thousands of small operations costs more than they do,
and the cores are the candidate's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class _Shared:
    """By all threads: how many are inside, and what it was before the first of them."""

    users: int = 0
    before: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


_shared = _Shared()


@contextmanager
def one_thread() -> Iterator[None]:
    """Meanwhile one; then what it was before the first of those who are in here at once.

    The setting is the process's: a thread that begins inside would take another's 1 for what to go back to.
    """
    with _shared.lock:
        now = torch.get_num_threads()  # asked first by every thread: a new one takes over the process's when asked
        if not _shared.users:
            _shared.before = now
        _shared.users += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _shared.lock:
            _shared.users -= 1
            torch.set_num_threads(_shared.before)
