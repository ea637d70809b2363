"""Show what `explain` says of the timed calls whose results were compared."""

from __future__ import annotations

from autosel.cli.explain import _checked


def test_the_rate_of_faults_that_the_compared_calls_rule_out_is_told() -> None:
    told = _checked(3000, 41_000)
    assert told == "3,000 of 41,000 timed calls were compared in full: no fault, a rate below 0.001 (95 %)"


def test_calls_of_which_none_was_compared_promise_nothing() -> None:
    assert _checked(0, 500) == "0 of 500 timed calls were compared in full"
