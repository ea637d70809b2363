"""Test turns of single calls, like the calls of a program."""

from __future__ import annotations

from random import Random

import pytest

from autosel.race.deployed import SITUATIONS, turns
from autosel.race.evidence import crossed
from autosel.race.plan import SESSIONS


def test_each_arm_is_called_once_a_turn_in_a_random_order() -> None:
    found = turns(["base", "fast", "slow"], Random(1))
    assert all(sorted(order) == ["base", "fast", "slow"] for _, order in found)
    assert len({tuple(order) for _, order in found}) > 1
    assert [name for name, _ in found] == [name for name, s in SITUATIONS.items() for _ in range(s.turns)]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_arm_that_is_always_slower_is_found_in_three_sessions(situation: str) -> None:
    calls = SESSIONS * SITUATIONS[situation].turns
    assert crossed(calls, calls)


def test_everything_that_runs_before_a_call_works() -> None:
    for situation in SITUATIONS.values():
        situation.ahead()
