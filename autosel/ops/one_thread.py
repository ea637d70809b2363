"""Run PyTorch on one thread for a while.

Forking a team for each of thousands of small operations costs more than the operations, and the candidate needs the
cores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class _Shared:
    """State shared by all threads: how many are inside, and the setting before the first of them."""

    users: int = 0
    before: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


_shared = _Shared()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one PyTorch thread inside the block; the last thread to leave restores the earlier setting.

    The setting belongs to the process: a thread that enters while another is inside must not save 1 as the earlier
    setting.
    """
    with _shared.lock:
        now = torch.get_num_threads()  # called by every thread first: it makes a new thread adopt the process's setting
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
