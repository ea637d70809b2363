"""Test how often the rules of `autosel.race` err on arms of known speed, and how often common rules do.

This is the short form: the limits are binomial, so fewer races make them wider, not wrong. tests/soak has the long
form. Every race is seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.guard.detector import ALARM, Detector
from autosel.ledger.commands import Spend
from autosel.ledger.store import open_ledger
from autosel.race.evidence import quantile_lower
from autosel.race.judge import CLONE, beats, has_lost, has_won, nominees, tail_counts, tail_threshold
from autosel.race.plan import (
    AA_SESSIONS,
    DELTA_CALIBRATED,
    SESSIONS,
    calibrated,
    clopper_pearson_upper,
    margin,
    quiet_sessions_needed,
)
from autosel.race.session import SessionRules, screen
from autosel.testing.rates import studies as error_rates
from autosel.testing.rates.noise import NOISES, attempt, confirmed, screened
from autosel.testing.rates.studies import (
    LONG,
    NOMINAL,
    POWER,
    RETRIES,
    SHORT,
    STUDIES,
    ErrorRate,
    attempts,
    broken,
    setting,
)
from tests import drawn

# Races a cell, so that all of it takes about ten seconds of one core.
RACES = {
    "identical": 60,
    "boundary": 30,
    "power": 10,
    "three arms": 40,
    "selection": 25,
    "session bias": 20,
    "calibration": 4_000,
    "lifetime": 60,
    "tail": 15,
    "controls": 150,
    "demotion": 300,
}


@pytest.mark.parametrize("study", drawn.share(list(STUDIES), days=2))
def test_rates_are_within_their_limits_and_common_rules_fail(study: str) -> None:
    assert broken(error_rates.measure(list(STUDIES[study]()), RACES[study])) == []


# --- rates and limits ------------------------------------------------------------------------------------------------


def rate(events: int, races: int, must: error_rates.Must, limit: float) -> ErrorRate:
    return ErrorRate(study="s", what="w", noise="iid", must=must, limit=limit, events=events, races=races)


def test_a_rate_holds_up_to_three_standard_errors_and_no_further() -> None:
    assert rate(241, 4000, "at most", 0.05).holds  # .05 + 3 * .00345 = .0603
    assert not rate(242, 4000, "at most", 0.05).holds
    assert rate(3942, 4000, "at least", 0.99).holds  # .99 - 3 * .00157 = .9853
    assert not rate(3941, 4000, "at least", 0.99).holds


def test_a_control_that_fails_nowhere_is_reported() -> None:
    quiet, failing = rate(5, 100, "fail", 0.05), replace(rate(40, 100, "fail", 0.05), noise="ar1")
    assert broken([quiet]) == ["s: w fails under no noise: the simulator is toothless"]
    assert broken([quiet, failing]) == []


@pytest.mark.parametrize(("n", "x"), [(300, 0), (300, 15), (20, 20)])
def test_the_upper_limit_of_a_rate_leaves_a_twentieth_above_it(n: int, x: int) -> None:
    p = clopper_pearson_upper(n, x)
    below = sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(x + 1))
    assert below == pytest.approx(0.05 if x < n else 1.0)


# --- assumptions of the studies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(NOISES))
def test_a_session_ends_at_the_first_pair_at_which_the_judge_would_end_it(kind: str) -> None:
    """The counts kept pair by pair equal the judge's counts from all samples."""
    for form, ratio, seed in ((SHORT, 1.05, 1), (LONG, 1.03, 2), (LONG, 1.0, 3)):
        s, random = setting(ratio, kind, form, DELTA_CALIBRATED), Random(seed)
        session = confirmed(s, ["same"], random, screened(s, random))

        def over(pairs: int) -> bool:
            part = replace(session, pairs=session.pairs[:pairs])  # noqa: B023
            lost = has_lost(part, "same", ["base"], s.delta)  # noqa: B023
            late = pairs >= form.min_pairs  # noqa: B023
            return lost or (late and (has_won(part, "same", ["base"], s.delta) or pairs >= form.max_pairs))  # noqa: B023

        assert [over(n) for n in range(1, len(session.pairs) + 1)] == [False] * (len(session.pairs) - 1) + [True]


def test_the_last_session_continues_for_the_tail_until_the_judge_would_decide() -> None:
    s = setting(1.2, "iid", LONG, DELTA_CALIBRATED, stutters={"base": 0.0, "same": 0.06})
    race = attempt(s, Random(4))
    assert len(race.sessions) == 1 + SESSIONS
    threshold, confirming = tail_threshold(race.sessions[0]), race.sessions[1:]
    last = confirming[-1]
    assert len(last.pairs) > LONG.min_pairs

    def settled(pairs: int) -> bool:
        from autosel.race.evidence import tail_crossed, tail_futile

        slow, n = tail_counts([*confirming[:-1], replace(last, pairs=last.pairs[:pairs])], "same", threshold)
        return tail_crossed(n, slow) or tail_futile(n, slow) or n >= LONG.tail_samples

    assert settled(len(last.pairs))
    assert not any(settled(n) for n in range(LONG.min_pairs, len(last.pairs)))


@pytest.mark.parametrize("delta", [0.0, 0.02, 0.05])
def test_a_tie_at_the_margin_is_a_loss(delta: float) -> None:
    assert not beats(100.0, 100.0, delta)
    assert not beats(100.0, (1 + delta) * 100.0, delta)
    assert beats(100.0, (1 + delta) * 100.0 + 1e-9, delta)


@given(st.integers(1, 400), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_lower_limit_of_a_quantile_has_its_confidence(n: int, q: float) -> None:
    k = int(quantile_lower(list(range(1, n + 1)), q))

    def at_least(k: int) -> float:
        return sum(comb(n, j) * q**j * (1 - q) ** (n - j) for j in range(k, n + 1))

    assert k == 1 or at_least(k) >= 0.95 - 1e-9
    assert k == n or at_least(k + 1) < 0.95 + 1e-9


def test_a_hiccup_of_the_baseline_does_not_become_the_measure_of_the_tail() -> None:
    """Check 3 slow samples of 100: the plain p95 of 28 samples is a slow one in a fifth of all screenings."""
    s = setting(1.0, "iid", LONG, DELTA_CALIBRATED, stutters={"base": 0.03})
    random = Random(5)
    blind = sum(tail_threshold(screened(s, random)) > 2 for _ in range(300))
    assert blind <= 0.05 * 300 + 3 * (0.05 * 0.95 * 300) ** 0.5


def test_a_clock_that_changes_its_speed_does_not_hide_the_fastest() -> None:
    """Compare within pairs: medians of whole sessions misrank arms 5 % apart under two clock states."""
    s, random = setting(1.05, "two_clock_states", SHORT, DELTA_CALIBRATED), Random(6)
    assert all(nominees(screened(s, random), "base", s.delta) == ["same"] for _ in range(60))


def twins(seed: int, luck: float) -> tuple[bool | None, int]:
    """Return (crossed, pairs) of an A/A session whose clone is biased by this factor."""
    s = setting(1.0, "iid", SHORT, DELTA_CALIBRATED)
    s = replace(s, true_ns={"base": 2e3, CLONE: 2e3 / (1 + luck)})
    session = screen(s.bench(Random(seed)), ["base", CLONE], SessionRules(plan=SHORT, delta=0.02, seed=seed))
    return session.aa_crossed, len(session.pairs)


def test_an_aa_session_stops_by_the_same_rule_as_a_confirming_one() -> None:
    assert twins(1, 0.0) == (False, SHORT.screening_pairs)  # hopeless either way round after a few pairs
    assert twins(1, 0.10) == (True, SHORT.screening_pairs)
    assert twins(1, -0.10) == (True, SHORT.screening_pairs)  # the clone slower: the same luck the other way round
    undecided = [twins(seed, 0.022) for seed in range(20)]
    assert any(SHORT.screening_pairs < pairs <= SHORT.max_pairs for _, pairs in undecided)
    assert any(crossed for crossed, _ in undecided)


def test_luck_fixed_in_a_session_is_seen_by_calibration_before_it_promotes() -> None:
    """Keep the wide margin on a device whose sessions differ by 2 %, because many of its A/A sessions cross."""
    s = setting(1.0, "iid", SHORT, DELTA_CALIBRATED, session_spread=0.02)
    found = error_rates.aa(s, 59, Random(7))
    assert margin(found.races, found.events, 1e9).delta > DELTA_CALIBRATED


def test_a_candidate_at_the_margin_is_nominated_by_luck_and_still_not_promoted() -> None:
    """Nominate it regardless of screening, so that only the confirming sessions decide."""
    s = setting(1.05, "iid", LONG, 0.05)
    found = attempts(s, 400, Random(8), nominate="same")
    assert found.events <= 400 * NOMINAL + 3 * (400 * NOMINAL) ** 0.5


# --- who gets the narrow margin ---------------------------------------------------------------------------------------


def test_after_one_crossing_a_device_needs_many_quiet_sessions() -> None:
    assert [quiet_sessions_needed(x, x) + x for x in range(4)] == [AA_SESSIONS, 222, 267, 308]
    assert quiet_sessions_needed(58, 0) == 1
    assert quiet_sessions_needed(60, 0) == 0
    assert 4_000 < quiet_sessions_needed(400, 200) + 400 < 6_000  # half of them crossed: 5 % is far away


@given(st.integers(1, 300), st.floats(0.05, 1))
def test_evidence_of_quiet_sessions_is_not_expected_to_grow_where_they_cross(n: int, pi: float) -> None:
    """One more session changes the evidence that pi <= .05 by a factor of mean 1 at most, if pi is not."""
    for x in range(min(n, 4)):
        mean = pi * evidence(n + 1, x + 1) + (1 - pi) * evidence(n + 1, x)
        assert mean <= evidence(n, x) * (1 + 1e-9)


def evidence(sessions: int, crossings: int) -> float:
    """Compute the value that `calibrated` compares with 20, by numerical integration over the rates in (0, .05)."""
    rates = (np.arange(2_000) + 0.5) * 0.05 / 2_000
    logs = crossings * np.log(rates / 0.05) + (sessions - crossings) * np.log((1 - rates) / 0.95)
    never = 0.95**-sessions if crossings == 0 else 0.0
    return 0.97 * never + 0.03 * float(np.exp(logs).mean())


@given(st.integers(1, 500), st.integers(0, 12))
def test_a_device_is_calibrated_at_twenty_to_one(n: int, x: int) -> None:
    found = evidence(n, min(x, n))
    assert calibrated(n, min(x, n)) == (found >= 20) or abs(found - 20) < 1e-3


@pytest.mark.parametrize(("n", "x"), [(4_000, 2_000), (20_000, 700)])
def test_an_interval_of_a_long_history_is_near_the_normal_one(n: int, x: int) -> None:
    rate = x / n
    assert clopper_pearson_upper(n, x) == pytest.approx(rate + 1.645 * (rate * (1 - rate) / n) ** 0.5, abs=2 / n)


# --- many attempts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pi", "allowed"), [(0.05, RETRIES), (0.12, 5), (0.22, 0)])
def test_the_ledger_pays_for_as_many_attempts_as_the_study_assumes(tmp_path, pi: float, allowed: int) -> None:
    bound = error_rates.margin_of(DELTA_CALIBRATED, pi).false_promotion_bound
    with open_ledger(home=tmp_path) as ledger:
        paid = [ledger.write(Spend(key="key", amount=bound, reason="attempt")) for _ in range(RETRIES)]
    assert paid == [True] * allowed + [False] * (RETRIES - allowed)
    assert error_rates.allowance(bound) == allowed


# --- demotion ---------------------------------------------------------------------------------------------------------


def test_a_kernel_as_fast_as_the_baseline_runs_ten_thousand_pairs_before_a_false_alarm() -> None:
    even = error_rates.length(0.5, 150, Random(9))
    assert even.holds
    assert even.mean > ALARM / 2


def test_a_kernel_that_has_become_slower_is_found_in_tens_or_hundreds_of_pairs() -> None:
    lengths: Sequence[error_rates.Length] = [error_rates.length(lost, 300, Random(10)) for lost in (0.6, 0.9, 1.0)]
    assert [round(found.mean, -1) for found in lengths[1:]] == [30, 20]
    assert 250 < lengths[0].mean < 350
    assert lengths[2].p95 == lengths[2].mean  # 24 losses in a row, always


@given(st.lists(st.lists(st.sampled_from([True, True, False]), min_size=40, max_size=40), min_size=1, max_size=4))
def test_the_vectorised_detector_equals_single_detectors(rows: list[list[bool]]) -> None:
    def speaks(row: list[bool]) -> bool:
        detector = Detector()
        return any(detector.add(lost) or detector.alarm for lost in row)

    assert list(error_rates.alarmed(np.array(rows))) == [speaks(row) for row in rows]


def test_power_is_counted_per_attempt_not_per_session() -> None:
    s = setting(1.05, "iid", SHORT, DELTA_CALIBRATED)
    found = attempts(s, 40, Random(11))
    assert found.events / found.races >= POWER - 3 * (POWER * (1 - POWER) / 40) ** 0.5
