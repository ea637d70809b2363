"""Run the long form of tests/null/test_race_judge_error_rates.py: at least 4,000 races per cell, tight limits."""

from __future__ import annotations

import os

import pytest

from autosel.testing.rates.studies import STUDIES, broken, measure, run_lengths

RACES = 4_000


@pytest.mark.parametrize("study", STUDIES)
def test_rates_are_within_their_limits_and_common_rules_fail(study: str) -> None:
    rates = measure(list(STUDIES[study]()), RACES, jobs=len(os.sched_getaffinity(0)))
    assert broken(rates) == []


def test_false_alarms_of_the_demotion_rule_are_rare() -> None:
    assert all(found.holds for found in run_lengths(1_000))
