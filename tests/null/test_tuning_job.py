"""Test the tally of a tune: what it reports of a stage."""

from __future__ import annotations

from typing import Any, cast

from autosel.race.contest import Contest
from autosel.race.run import Tick
from autosel.tuning.job import TuneEvents
from autosel.values import RaceSession, Workload
from tests.quiet import Quiet

ATTN = Workload(
    op="attn", dims=(("B", 1), ("Hq", 32), ("Hkv", 8), ("S", 1), ("D", 128), ("L", 8192)), dtype="bf16", traits=()
)


class Told(Quiet):
    def __init__(self) -> None:
        self.stages: list[tuple[object, ...]] = []

    def stage(self, *what: object) -> None:
        self.stages.append(what)


def test_a_stage_keeps_its_count_while_its_detail_changes() -> None:
    told = Told()
    tally = TuneEvents(told)
    tally.stage("parity", "cpp:gemv", 3, 13)
    tally.stage("parity", "compiling cpu/attn.cpp", 0, 0)
    tally.stage("waiting", "for a quiet machine", 0, 0)
    assert told.stages[1] == ("parity", "compiling cpu/attn.cpp", 3, 13)
    assert told.stages[2] == ("waiting", "for a quiet machine", 0, 0)


def test_a_race_reports_its_place_in_the_stage_and_the_name_that_tables_show() -> None:
    told = Told()
    baseline = cast(Any, None)
    contest = Contest(
        workload=ATTN, baseline=baseline, incumbent=baseline, challengers=(), margins={}, llc_bytes=1 << 20
    )
    session = RaceSession(kind="screening", seed=1, arms=("torch:sdpa",), pairs=(), calls_per_sample=(1,))
    TuneEvents(told).tick(Tick(contest=contest, stage="screening", candidate="", session=session, done=2, total=5))
    assert told.stages == [("screening", "0 pairs  attn B1 H32/8 D128 L8192", 2, 5)]
