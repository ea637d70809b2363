"""Check that each thread is bound to a separate core, and gets its previous affinity back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from autosel.race.spread import ThreadPlacement

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU, or a system without affinities")


@contextmanager
def sleeper() -> Iterator[int]:
    """Start a thread that waits to be ended; return its id."""
    ends, told = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (told.set(), ends.wait()))
    thread.start()
    told.wait()
    assert thread.native_id is not None
    yield thread.native_id
    ends.set()
    thread.join()


@pytest.fixture
def threads() -> Iterator[list[int]]:
    with ExitStack() as stack:
        yield [stack.enter_context(sleeper()) for _ in range(2)]


def test_each_thread_gets_a_core_and_its_affinity_back(threads: list[int]) -> None:
    before = [os.sched_getaffinity(thread) for thread in threads]
    spread = ThreadPlacement(CPUS)
    spread.place(threads)
    bound = [os.sched_getaffinity(thread) for thread in threads]
    assert [len(cpus) for cpus in bound] == [1, 1] and bound[0] != bound[1]
    spread.release()
    assert [os.sched_getaffinity(thread) for thread in threads] == before


def test_a_thread_that_is_bound_stays_where_it_is(threads: list[int]) -> None:
    os.sched_setaffinity(threads[1], {CPUS[0]})
    spread = ThreadPlacement(CPUS[:2])
    spread.place(threads)
    assert [os.sched_getaffinity(thread) for thread in threads] == [{CPUS[1]}, {CPUS[0]}]
    spread.release()
    assert os.sched_getaffinity(threads[1]) == {CPUS[0]}


def test_more_threads_than_cores_are_left_alone(threads: list[int]) -> None:
    before = [os.sched_getaffinity(thread) for thread in threads]
    ThreadPlacement(CPUS[:1]).place(threads)
    assert [os.sched_getaffinity(thread) for thread in threads] == before


def test_a_thread_that_has_ended_is_skipped(threads: list[int]) -> None:
    with sleeper() as gone:
        pass
    spread = ThreadPlacement(CPUS)
    spread.place([gone, threads[0]])
    assert len(os.sched_getaffinity(threads[0])) == 1
    spread.release()
