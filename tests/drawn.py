"""Select the cases of a test run: the day of the rotating tests, and the seed of the random inputs.

    pytest --on-day 2026-11-24 --seed 7      repeat a run; defaults: today, and a new seed

tests/conftest.py sets both, and prints them if a test fails. .ci/run gives both, so that CI is deterministic.
"""

from __future__ import annotations

import datetime
import itertools
import math
import secrets
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")

day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
seed = secrets.randbits(32)
every = False  # --every-target: all choices of the rotating tests


def turn() -> int:
    """Return the number of the day, which selects the cases of rotating tests."""
    return datetime.date.fromisoformat(day).toordinal()


def todays(choices: Sequence[Choice], shift: int = 0) -> Choice:
    """Choose one of them, each on equally many days; the choice moves by about three fifths of the list each day. A
    test that runs on one day in so many (`share`) reaches every choice too, whatever the two numbers are.

    For two varying things, pass their product: separate turns would meet in few combinations.
    """
    count, day_ = len(choices), turn() + shift
    step = next(s for s in itertools.count(max(1, round(0.6 * count))) if math.gcd(s, count) == 1)
    at, rounds = day_ * step, day_ // count
    while rounds and count > 1:  # by one more each time that all had their turn, and each time that all had this shift
        at, rounds = at + rounds, rounds // count
    return choices[at % count]


def share(choices: Sequence[Choice], days: int, shift: int = 0) -> list[Choice]:
    """Return the part for today: every choice has its turn within so many days.

    Two shares of one test must have numbers of days without a common divisor, else some combinations never meet.
    """
    return [c for number, c in enumerate(choices) if every or (turn() + number + shift) % days == 0]


def third() -> int:
    """Return 0, 1 or 2: the digit sum of the day's number in base 3, modulo 3. Every share of days has as many of each
    (Gelfond 1968), so that a third and a share within it meet in all combinations; a third returns within five days.
    """
    left, total = turn(), 0
    while left:
        left, digit = divmod(left, 3)
        total += digit
    return total % 3


def options() -> str:
    return f"--on-day {day} --seed {seed}"
