"""Threads that wait for child processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """An executor that finishes its work on leaving, and on an exception (Ctrl-C) leaves at once with nothing new
    begun; what a child process is at ends with us."""
    executor = ThreadPoolExecutor(max_workers=threads)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
