"""Test the turns of rotating tests: every choice is reached, also by a test that does not run every day."""

from __future__ import annotations

import datetime

import pytest

from tests import drawn, thirds

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


@pytest.mark.parametrize("days", [1, 2, 3, 5, 6, 7, 8, 9, 15])
def test_a_share_of_the_days_meets_every_third_in_all_its_turns(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, thirds_seen = set(), list[int]()
    for at in range(40 * days):
        monkeypatch.setattr(drawn, "day", datetime.date.fromordinal(FIRST + at).isoformat())
        seen.add((drawn.turn() % days, drawn.third()))
        thirds_seen.append(drawn.third())
    assert len(seen) == 3 * days
    assert all(set(thirds_seen[at : at + 5]) == {0, 1, 2} for at in range(len(thirds_seen) - 4))


def test_a_file_is_in_one_part_at_most_and_runs_on_its_days(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [thirds.TESTS / name for part in thirds.PARTS for name in part]
    assert all(file.is_file() for file in files) and len(set(files)) == len(files)
    monkeypatch.setattr(drawn, "every", False)
    running = []
    for third in range(3):
        monkeypatch.setattr(drawn, "third", lambda third=third: third)
        running += [file for file in files if not thirds.rests(file)]
    assert sorted(running) == sorted(files)
    assert not thirds.rests(thirds.TESTS / "null" / "test_drawn.py")
    monkeypatch.setattr(drawn, "every", True)
    assert not any(thirds.rests(file) for file in files)
