"""A pool of threads that wait for child processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield an executor that finishes its work at the end of the block.

    After an exception (Ctrl-C), end at once and start no more work; child processes end with this process.
    """
    executor = ThreadPoolExecutor(max_workers=threads)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
