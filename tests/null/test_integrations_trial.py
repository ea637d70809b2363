"""Test how an engine's own kernel and a decided one are compared, on a clock that the kernels set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosel.integrations import trial
from autosel.integrations.trial import TIMED, ServingTrial


class Clock:
    """A clock that each call advances by its cost."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.ran: list[str] = []

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def kernel(self, name: str, costs_ns: int) -> Callable[[], str]:
        def run() -> str:
            self.now_ns += costs_ns
            self.ran.append(name)
            return name

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trial, "time", made)
    return made


@pytest.mark.parametrize(("decided_ns", "own_ns", "pays"), [(90, 100, True), (110, 100, False), (100, 100, True)])
def test_the_faster_one_wins_after_as_many_calls_of_each(
    clock: Clock, decided_ns: int, own_ns: int, pays: bool
) -> None:
    compared = ServingTrial(5)
    decided, own = clock.kernel("decided", decided_ns), clock.kernel("own", own_ns)
    while not compared.over:
        made, mine = compared(decided, own)
        assert made == ("decided" if mine else "own")
    assert compared.pays is pays
    assert clock.ran.count("decided") == 5 + TIMED and clock.ran.count("own") == TIMED


def test_the_first_calls_are_the_decided_kernels_and_do_not_count(clock: Clock) -> None:
    compared, slow = ServingTrial(3), clock.kernel("preparing its weights", 10**9)
    for _ in range(3):
        compared(slow, clock.kernel("own", 100))
    while not compared.over:
        compared(clock.kernel("decided", 10), clock.kernel("own", 100))
    assert compared.pays and clock.ran[:3] == ["preparing its weights"] * 3


def test_the_order_of_the_two_kernels_is_random(clock: Clock) -> None:
    """Mix the order, because layers run in the same order in every step: alternating would time one kernel only on even
    layers."""
    compared = ServingTrial(0)
    while not compared.over:
        compared(clock.kernel("a", 10), clock.kernel("b", 10))
    runs = [x for x, y in zip(clock.ran, clock.ran[1:], strict=False) if x == y]
    assert {"a", "b"} == set(runs)
    assert set(clock.ran[:12]) == {"a", "b"}


@pytest.mark.parametrize("settling", [0, 1])
def test_where_the_decided_kernel_fails_the_engines_own_runs(clock: Clock, settling: int) -> None:
    compared = ServingTrial(settling)
    for _ in range(8):
        assert compared(lambda: None, clock.kernel("own", 100)) == ("own", False)
