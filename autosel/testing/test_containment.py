"""Containment: the candidate loads, does not change its process, idles between calls, and leaves no process running."""

import pytest

from autosel.testing.subject import Check, TestedCandidate


def test_it_loads(autosel_subject: TestedCandidate) -> None:
    _no_complaint(autosel_subject.load())


def test_what_it_leaves_behind(left: Check, autosel_subject: TestedCandidate) -> None:
    _no_complaint(autosel_subject.run(left))


def test_it_rests_between_calls(autosel_subject: TestedCandidate) -> None:
    _no_complaint(autosel_subject.restless())


def test_nothing_outlives_it(autosel_subject: TestedCandidate) -> None:
    _no_complaint(autosel_subject.restless())
    ended = autosel_subject.close()
    assert ended is not None
    assert ended.left == 0, f"{ended.left} processes that the candidate started could not be ended"


def _no_complaint(text: str) -> None:
    if text:
        pytest.fail(text, pytrace=False)
