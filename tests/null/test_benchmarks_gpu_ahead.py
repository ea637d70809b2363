"""Test work that starts before it is needed: in order, limited in number, each error raised for its own piece."""

from __future__ import annotations

from threading import Barrier

import pytest

from benchmarks.gpu.ahead import WINDOW, Ahead


def test_only_a_limited_number_of_pieces_starts_in_advance() -> None:
    done: list[int] = []
    made = Ahead(range(100), done.append, threads=2)
    made.of(0)
    made.executor.shutdown()
    assert done == list(range(1 + WINDOW * 2))


def test_a_piece_requested_early_starts_after_all_earlier_pieces() -> None:
    made = Ahead(range(20), lambda n: n * n, threads=2)
    assert [made.of(n) for n in (15, 3, 19)] == [225, 9, 361]


def test_pieces_run_at_the_same_time() -> None:
    together = Barrier(3, timeout=60)
    made = Ahead(range(3), lambda _: together.wait(), threads=3)
    assert {made.of(n) for n in range(3)} == {0, 1, 2}


def test_an_error_is_raised_for_its_own_piece_alone() -> None:
    made = Ahead([1, 0, 2], lambda n: 2 // n, threads=1)
    assert made.of(0) == 2 and made.of(2) == 1
    with pytest.raises(ZeroDivisionError):
        made.of(1)
