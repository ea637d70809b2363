"""Test the turns of rotating tests: every choice is reached, also by a test that does not run every day."""

from __future__ import annotations

import datetime

import pytest

from tests import drawn, halves

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


@pytest.mark.parametrize("days", [1, 2, 3, 5, 6, 7, 8, 15])
def test_a_share_of_the_days_meets_both_halves_in_all_its_turns(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, halves_seen = set(), list[int]()
    for at in range(40 * days):
        monkeypatch.setattr(drawn, "day", datetime.date.fromordinal(FIRST + at).isoformat())
        seen.add((drawn.turn() % days, drawn.half()))
        halves_seen.append(drawn.half())
    assert len(seen) == 2 * days
    assert not any(
        one == two == three for one, two, three in zip(halves_seen, halves_seen[1:], halves_seen[2:], strict=False)
    )


def test_a_file_is_in_one_half_at_most_and_runs_on_its_days(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [halves.TESTS / name for name in (*halves.ONE, *halves.OTHER)]
    assert all(file.is_file() for file in files) and len(set(files)) == len(files)
    monkeypatch.setattr(drawn, "every", False)
    resting = []
    for half in (0, 1):
        monkeypatch.setattr(drawn, "half", lambda half=half: half)
        resting.append({file for file in files if halves.rests(file)})
    assert resting[0] | resting[1] == set(files) and not resting[0] & resting[1]
    assert not halves.rests(halves.TESTS / "null" / "test_drawn.py")
    monkeypatch.setattr(drawn, "every", True)
    assert not any(halves.rests(file) for file in files)
