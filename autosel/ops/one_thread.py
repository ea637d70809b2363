"""Run PyTorch on one thread for a while, and long computations in parts by some threads of Python.

Forking a team for each of thousands of small operations costs more than the operations, and the candidate needs the
cores. PyTorch's team also spins for milliseconds after its work, when a candidate is timed; threads of Python sleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch

Part = TypeVar("Part")
Made = TypeVar("Made")
MOST_AT_ONCE = 4


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


_spread: ContextVar[bool] = ContextVar("autosel_spread", default=False)


@contextmanager
def spread() -> Iterator[None]:
    """Let `each` use the cores inside the block: for a process that computes while all others wait for it."""
    token = _spread.set(True)
    try:
        with one_thread():
            yield
    finally:
        _spread.reset(token)


def each(made: Callable[[Part], Made], parts: Iterable[Part]) -> list[Made]:
    """Return made(part) of each part, in order; inside `spread`, of several at once."""
    return list(_pool().map(made, parts)) if _spread.get() else [made(part) for part in parts]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_AT_ONCE, len(os.sched_getaffinity(0))), thread_name_prefix="autosel-each")
