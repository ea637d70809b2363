"""What a test run draws: the day whose share of the rotating tests it takes, and the seed of its random inputs.

    pytest --on-day 2026-11-24 --seed 7      repeat a run; without them it is today, and another seed each time

tests/conftest.py sets both, and prints them if a test fails. .ci/run gives both, so that neither decides.
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


def turn() -> int:
    """The number of the day, from which rotating tests count."""
    return datetime.date.fromisoformat(day).toordinal()


def todays(choices: Sequence[Choice], shift: int = 0) -> Choice:
    """One of them, each in as many days as there are; from one day to the next about three fifths of the list further.

    For two things that vary, pass their product: turns of their own would meet in few of the combinations.
    """
    count = len(choices)
    step = next(s for s in itertools.count(max(1, round(0.6 * count))) if math.gcd(s, count) == 1)
    return choices[(turn() + shift) * step % count]


def options() -> str:
    return f"--on-day {day} --seed {seed}"
