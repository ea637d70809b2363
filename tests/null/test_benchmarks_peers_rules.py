"""Test that the imitated rules are implemented correctly; a control that fails by a bug would prove nothing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers_rules import P_VALUE, RULES, _student


def drawn(races: int, samples: int = 100, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Draw samples of two arms with the same distribution."""
    times = np.random.default_rng(seed).lognormal(0, 0.05, (2, races, samples))
    return times[0], times[1]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_tenth_faster_is_always_seen_and_a_tenth_slower_never(rule) -> None:
    base, own = drawn(50)
    assert rule.decide(base, own / 1.2).all()
    assert not rule.decide(base, own * 1.2).any()


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_races_are_decided_equally_one_by_one_and_in_an_array(rule) -> None:
    base, own = drawn(20)
    together = rule.decide(base, own)
    assert together.shape == (20,)
    assert [bool(rule.decide(b, o)) for b, o in zip(base, own, strict=True)] == together.tolist()


@pytest.mark.parametrize(("name", "delta"), [("median 2 % lower", 0.02), ("median 5 % lower", 0.05)])
def test_a_gain_below_the_margin_is_not_reported(name: str, delta: float) -> None:
    flat = np.ones(9)
    assert RULES[name].decide((1 + delta + 1e-6) * flat, flat)
    assert not RULES[name].decide((1 + delta - 1e-6) * flat, flat)


# Student's t at p = .01, one-sided, from any table.
@pytest.mark.parametrize(("degrees", "value"), [(9, 2.821), (30, 2.457), (99, 2.365)])
def test_students_limits_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert _student(degrees) == pytest.approx(value, abs=1e-3)


def test_mann_whitney_keeps_its_level_on_independent_samples() -> None:
    base, own = drawn(3000)
    error = (P_VALUE * (1 - P_VALUE) / 3000) ** 0.5
    assert RULES["Mann-Whitney, p < .01"].decide(base, own).mean() == pytest.approx(P_VALUE, abs=3 * error)


def test_mann_whitney_finds_nothing_in_ties() -> None:
    assert not RULES["Mann-Whitney, p < .01"].decide(np.ones(50), np.ones(50))


def test_one_look_of_the_t_test_keeps_its_level_and_ninety_do_not() -> None:
    base, own = drawn(3000)
    error = (P_VALUE * (1 - P_VALUE) / 3000) ** 0.5
    once = RULES["peeking t test, p < .01"].decide(base[:, :10], own[:, :10]).mean()
    assert once == pytest.approx(P_VALUE, abs=3 * error)
    assert RULES["peeking t test, p < .01"].decide(base, own).mean() > 3 * P_VALUE
