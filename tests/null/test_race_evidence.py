"""Test the statistics: exact, monotone, and calibrated by definition."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from math import comb
from statistics import geometric_mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.race.evidence import (
    crossed,
    e_pairs,
    futile,
    median_interval,
    pooled,
    quantile,
    rerun_interval,
    student,
    tail_crossed,
    tail_futile,
)
from autosel.race.plan import margin, plan


@pytest.mark.parametrize(("threshold", "pairs"), [(20, 7), (100, 9), (1000, 13)])
def test_all_wins_cross_after_the_published_number_of_pairs(threshold: int, pairs: int) -> None:
    assert crossed(pairs, pairs, threshold)
    assert not crossed(pairs - 1, pairs - 1, threshold)


@given(st.integers(1, 60), st.data())
def test_e_pairs_is_a_martingale_for_a_fair_coin(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))

    def exact(n: int, k: int) -> Fraction:
        return Fraction(sum(comb(n + 1, j) for j in range(k + 1)), (n + 1) * comb(n, k))

    assert (exact(n + 1, k + 1) + exact(n + 1, k)) / 2 == exact(n, k)
    assert e_pairs(n, k) == pytest.approx(float(exact(n, k)))


@given(st.integers(1, 80), st.data())
def test_more_wins_are_more_evidence(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n - 1))
    assert e_pairs(n, k) < e_pairs(n, k + 1)


@given(st.integers(1, 120), st.data())
def test_no_candidate_is_both_promoted_and_futile(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    assert not (crossed(n, k) and futile(n, k))


def test_a_clean_tail_clears_after_62_samples_and_not_before() -> None:
    assert not tail_crossed(61, 0)
    assert tail_crossed(62, 0)


@given(st.integers(1, 200), st.data())
def test_e_tail_is_a_supermartingale_at_the_boundary_rate(n: int, data: st.DataObject) -> None:
    x = data.draw(st.integers(0, n))
    p0 = Fraction(1, 10)

    def exact(n: int, x: int) -> Fraction:
        top = sum(comb(n + 1, j) * p0**j * (1 - p0) ** (n + 1 - j) for j in range(x + 1, n + 2))
        return top / ((n + 1) * comb(n, x) * p0 ** (x + 1) * (1 - p0) ** (n - x))

    assert p0 * exact(n + 1, x + 1) + (1 - p0) * exact(n + 1, x) == exact(n, x)
    assert tail_crossed(n, x) == (exact(n, x) >= 100)
    assert not (tail_crossed(n, x) and tail_futile(n, x))


@given(st.lists(st.floats(1, 100), min_size=6, max_size=80))
def test_the_median_interval_contains_the_median(values: list[float]) -> None:
    low, high = median_interval(values)
    assert low <= quantile(values, 0.5) <= high


def test_the_median_interval_has_its_confidence() -> None:
    # Of the 2^20 ways 20 values fall about the true median, the interval must cover at least 95 %.
    low, high = median_interval(list(range(20)))
    covered = sum(comb(20, j) for j in range(int(low) + 1, int(high) + 1))
    assert covered >= 0.95 * 2**20
    assert covered - comb(20, int(low) + 1) - comb(20, int(high)) < 0.95 * 2**20  # and no wider than needed


@pytest.mark.parametrize("sessions", [2, 3, 4])
def test_the_interval_of_sessions_holds_the_ratio_of_another_run_in_nineteen_of_twenty(sessions: int) -> None:
    draw = random.Random(sessions)

    def run() -> list[float]:
        return [4.0 * math.exp(draw.gauss(0, 0.02)) for _ in range(sessions)]

    held = 0
    for _ in range(races := 20_000):
        low, high = rerun_interval(run())
        held += low <= geometric_mean(run()) <= high
    assert held / races == pytest.approx(0.95, abs=0.006)  # four standard errors


def test_the_interval_of_a_single_session_is_its_ratio() -> None:
    assert rerun_interval([3.5]) == (3.5, 3.5)


@pytest.mark.parametrize(
    ("earlier", "held_in"),
    [(0, 0.77), (5, 0.91), (20, 0.94), (60, 0.95)],  # without earlier runs the slow changes are unknown
)
def test_earlier_runs_show_what_changes_too_slowly_for_the_sessions_of_one(earlier: int, held_in: float) -> None:
    """Each run has a level of its own, which its three sessions share."""
    draw = random.Random(7)

    def run() -> list[float]:
        level = draw.gauss(0, 0.04)
        return [4.0 * math.exp(level + draw.gauss(0, 0.03)) for _ in range(3)]

    held = 0
    for _ in range(races := 8_000):
        before = pooled([[geometric_mean(run()) for _ in range(earlier + 1)]])
        low, high = rerun_interval(run(), before)
        held += low <= geometric_mean(run()) <= high
    assert held / races == pytest.approx(held_in, abs=0.01)


@pytest.mark.parametrize(
    ("degrees", "quantile"),  # of two-sided 95 %, as tables have them
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (60, 2.000), (120, 1.980)],
)
def test_students_quantiles_are_those_of_tables(degrees: int, quantile: float) -> None:
    assert student(degrees, 0.95) == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize(
    ("sessions", "crossings", "sample_ns", "delta"),
    [
        (58, 0, 1e9, 0.05),
        (59, 0, 1e9, 0.02),
        (60, 5, 1e9, 0.05),  # a noisy device
        (59, 0, 4_000, pytest.approx(0.1)),  # a sample of a few clock ticks
    ],
)
def test_59_quiet_aa_sessions_give_the_two_percent_margin(
    sessions: int, crossings: int, sample_ns: float, delta: float
) -> None:
    found = margin(sessions, crossings, sample_ns)
    assert found.delta == delta and found.calibrated == (sessions == 59)
    assert found.pi <= 0.05 and found.false_promotion_bound <= 0.05**3


def test_the_plan_depends_only_on_the_baseline() -> None:
    short, long = plan(2_000), plan(5_000_000)
    assert (short.calls, short.samples) == (200, 8)
    assert (long.calls, long.time_class) == (1, "long") and long.min_pairs >= 12
