"""Run the long form of tests/flows/test_pipeline_durability.py: more than 1,000 kills of a tuning process, at every
failpoint, at random moments, and of tunes in which nothing is replaced. In parts of a few minutes; `-s` shows the kills
of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from random import Random

import pytest

from tests.cpu.killed import Graveyard, kill_at_moments, kill_at_step, kill_real

FAILPOINT_PARTS = 4
MOMENT_PARTS, MOMENTS = 5, 140
REAL_PARTS, REAL = 8, 5


@pytest.fixture
def graveyard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graveyard]:
    made = Graveyard(tmp_path_factory.mktemp("graveyard"))
    made.whole()
    yield made
    sys.stderr.write(f"{made.kills} kills, nothing lost\n")


@pytest.mark.parametrize("part", range(FAILPOINT_PARTS))
def test_killed_at_every_failpoint_a_tune_loses_nothing_and_comes_to_the_same_end(
    graveyard: Graveyard, part: int
) -> None:
    fuse = part
    while kill_at_step(graveyard, fuse):
        fuse += FAILPOINT_PARTS
    assert fuse > 200, "every statement, commit, file and publication of a tune is a failpoint"


@pytest.mark.parametrize("part", range(MOMENT_PARTS))
def test_killed_at_random_moments_tunes_lose_nothing_and_come_to_the_same_end(graveyard: Graveyard, part: int) -> None:
    assert kill_at_moments(graveyard, MOMENTS, Random(part), graveyard.whole()) >= MOMENTS


@pytest.mark.parametrize("part", range(REAL_PARTS))
def test_tunes_in_which_nothing_is_replaced_lose_nothing_and_leave_no_worker(graveyard: Graveyard, part: int) -> None:
    assert kill_real(graveyard, REAL, Random(part)) == REAL
