"""Run the long form of tests/flows/test_pipeline_durability.py: more than 1,000 kills of a tuning process, at every
failpoint, at random moments, and of tunes with real proofs and races. Parts take a few minutes; `-s` shows the kills
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
def test_a_tune_killed_at_every_failpoint_loses_nothing_and_reaches_the_same_decisions(
    graveyard: Graveyard, part: int
) -> None:
    fuse = part
    while kill_at_step(graveyard, fuse):
        fuse += FAILPOINT_PARTS
    assert fuse > 200, "a tune has too few failpoints"


@pytest.mark.parametrize("part", range(MOMENT_PARTS))
def test_tunes_killed_at_random_moments_lose_nothing_and_reach_the_same_decisions_in_the_long_form(
    graveyard: Graveyard, part: int
) -> None:
    assert kill_at_moments(graveyard, MOMENTS, Random(part), graveyard.whole()) >= MOMENTS


@pytest.mark.parametrize("part", range(REAL_PARTS))
def test_killed_tunes_with_real_proofs_and_races_lose_nothing_and_leave_no_worker(
    graveyard: Graveyard, part: int
) -> None:
    assert kill_real(graveyard, REAL, Random(part)) == REAL
