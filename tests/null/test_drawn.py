"""Test the turns of rotating tests: every choice is reached, also by a test that does not run every day."""

from __future__ import annotations

import datetime

import pytest

from tests import drawn

FIRST = datetime.date(2026, 1, 1).toordinal()


@pytest.mark.parametrize("days", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 18])
def test_a_test_of_one_day_in_some_reaches_every_choice(count: int, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [0] * count
    for at in range(4 * days * count * count):
        monkeypatch.setattr(drawn, "day", datetime.date.fromordinal(FIRST + at).isoformat())
        if drawn.share(["it"], days):
            seen[drawn.todays(range(count))] += 1
    assert min(seen) > 0, seen
    assert days > 1 or max(seen) - min(seen) <= 2, "each on equally many days, but for rounds cut at the ends"
