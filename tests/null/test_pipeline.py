"""Test one tune for several numbers of threads: what each part gets, and what is reported of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autosel import pipeline
from autosel.pipeline import Report, Request, tune_at
from tests.null.test_dispatch import W, baseline, decision


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Return the threads and the budget of each part; a part decides one workload in 4 seconds of the clock."""
    found: list[tuple[int, float]] = []

    def tune(request: Request, ledger: Any, listener: Any, *, clock: Any) -> Report:
        found.append((torch.get_num_threads(), request.budget_s))
        now[0] += 4.0
        made = decision(W, baseline("rmsnorm"), id=len(found))
        values: dict[str, Any] = {"fingerprint": None, "rejected": (), "undecided": (), "seconds": 4.0}
        return Report(decisions=(made,), measured=1, **values)

    monkeypatch.setattr(pipeline, "tune", tune)
    return found


now = [0.0]


def run(counts: tuple[int, ...], budget_s: float = 0.0) -> Report:
    request = Request(workloads=(), effort="quick", budget_s=budget_s)
    sink: Any = None
    return tune_at(request, counts, sink, sink, clock=lambda: now[0])


def test_each_number_of_threads_is_tuned_and_the_processs_own_which_is_zero_is_restored(
    threads: int, asked: list[tuple[int, float]]
) -> None:
    found = run((1, 0))
    assert asked == [(1, 0.0), (threads, 0.0)] and torch.get_num_threads() == threads
    assert [d.id for d in found.decisions] == [1, 2] and (found.measured, found.seconds) == (2, 8.0)


def test_the_budget_is_for_all_numbers_of_threads_together(threads: int, asked: list[tuple[int, float]]) -> None:
    run((1, 2, 1), budget_s=6.0)
    assert asked == [(1, 6.0), (2, 2.0), (1, 1e-3)]  # nothing new begins after its end
