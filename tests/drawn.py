"""What a test run draws: the day whose share of the rotating tests it takes, and the seed of its random inputs.

    pytest --on-day 2026-11-24 --seed 7      repeat a run; without them it is today, and another seed each time

tests/conftest.py sets both, and prints them if a test fails. .ci/run gives both, so that neither decides.
"""

from __future__ import annotations

import datetime
import secrets

day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
seed = secrets.randbits(32)


def turn() -> int:
    """The number of the day, from which rotating tests count."""
    return datetime.date.fromisoformat(day).toordinal()


def options() -> str:
    return f"--on-day {day} --seed {seed}"
