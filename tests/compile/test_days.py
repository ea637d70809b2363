"""What is too much for a day is gone through in days: all of it."""

from __future__ import annotations

import datetime

import pytest

from tests import drawn
from tests.compile import emulate


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12, 18, 38, 84, 108, 180])
def test_in_as_many_days_as_there_are_choices_each_has_its_turn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(day: int) -> int:
        monkeypatch.setattr(drawn, "day", datetime.date.fromordinal(day).isoformat())
        return emulate.todays(range(count))

    assert {choice(739_941 + day) for day in range(count)} == set(range(count))
