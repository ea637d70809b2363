"""Run a function in a forked process: for what a test does to its process, without starting Python and importing torch.

The process must not compute on several threads, because OpenMP's threads are not forked.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")
CONTEXT = multiprocessing.get_context("fork")


def forked(work: Callable[[], object]) -> BaseProcess:
    """Start a process that does this; its exit code is 0 unless it raises."""
    process = CONTEXT.Process(target=work)
    process.start()
    return process


def result_of(work: Callable[[], T]) -> T:
    """Return the result of this in a forked process."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = forked(lambda: there.send(work()))
    there.close()
    found: T = here.recv()
    process.join()
    return found
