"""Containment: it loads in time, leaves its process as it found it, rests between calls, and nothing outlives it."""

import pytest

from autosel.testing.subject import Check, Subject


def test_it_loads(autosel_subject: Subject) -> None:
    _no_complaint(autosel_subject.load())


def test_what_it_leaves_behind(left: Check, autosel_subject: Subject) -> None:
    _no_complaint(autosel_subject.run(left))


def test_it_rests_between_calls(autosel_subject: Subject) -> None:
    _no_complaint(autosel_subject.restless())


def test_nothing_outlives_it(autosel_subject: Subject) -> None:
    _no_complaint(autosel_subject.restless())
    ended = autosel_subject.close()
    assert ended is not None
    assert ended.left == 0, f"{ended.left} processes that it started could not be ended"


def _no_complaint(text: str) -> None:
    if text:
        pytest.fail(text, pytrace=False)
