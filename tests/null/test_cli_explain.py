"""Test the text of `explain` about the timed calls whose results were compared."""

from __future__ import annotations

from autosel.cli.explain import _checked


def test_the_rate_of_faults_that_the_compared_calls_exclude_is_shown() -> None:
    told = _checked(3000, 41_000)
    assert told == "3,000 of 41,000 timed calls were compared in full: no fault, a rate below 0.001 (95 %)"


def test_without_compared_calls_no_rate_is_shown() -> None:
    assert _checked(0, 500) == "0 of 500 timed calls were compared in full"
