"""Parity: every element is within the op's bound on hostile inputs, in repeated calls and at full size."""

import pytest

from autosel.testing.subject import Check, TestedCandidate


def test_hostile_inputs(hostile: Check, autosel_subject: TestedCandidate) -> None:
    _must_pass(autosel_subject, hostile)


def test_call_after_call(habit: Check, autosel_subject: TestedCandidate) -> None:
    _must_pass(autosel_subject, habit)


def test_full_size(size: Check, autosel_subject: TestedCandidate) -> None:
    _must_pass(autosel_subject, size)


def _must_pass(subject: TestedCandidate, check: Check) -> None:
    wrong = subject.run(check)
    if wrong:
        pytest.fail(wrong, pytrace=False)
