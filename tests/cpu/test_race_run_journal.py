"""Check that the journal has each candidate before its first run in a race, so that it is known if the machine goes
down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from autosel.ledger import Ledger, open_ledger
from autosel.ledger import schema as t
from autosel.race.run import RaceTerms, _held
from autosel.tuning import contend
from autosel.values import Arm, RaceSession
from tests.cpu.test_ledger import ATTN, BASELINE, CPP, FP, PACKED


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with open_ledger(home=tmp_path / "home", alone=True) as made:
        yield made


def way(arm: Arm) -> Any:
    return SimpleNamespace(candidate=SimpleNamespace(name=arm.candidate), arm=arm)


def journal(ledger: Ledger) -> Any:
    tuning: Any = SimpleNamespace(
        ledger=ledger,
        fp=FP,
        threads=2,
        rng=Random(1),
        clock=None,
        deadline=0.0,
        request=SimpleNamespace(device="cpu", wait=False),
        tally=SimpleNamespace(tick=None),
    )
    job: Any = SimpleNamespace(ways=[way(CPP), way(PACKED)])
    return contend._terms(tuning, {ATTN.key: job}).journal


def open_and_ended(ledger: Ledger) -> tuple[list[str], list[str]]:
    trials, ends = t.trials, t.trial_ends
    query = sa.select(t.candidates.c.name, ends.c.outcome).select_from(
        trials.join(t.candidates).outerjoin(ends, ends.c.trial_id == trials.c.id)
    )
    with ledger.reading() as c:
        found = c.execute(query).all()
    return [name for name, outcome in found if outcome is None], [outcome for _, outcome in found if outcome]


def test_a_challenger_is_journaled_while_it_is_seated_and_pytorchs_own_is_not(ledger: Ledger) -> None:
    contest: Any = SimpleNamespace(workload=ATTN)
    with journal(ledger)(contest, (BASELINE.candidate, CPP.candidate, PACKED.candidate)):
        assert open_and_ended(ledger) == ([CPP.candidate], [])
    assert open_and_ended(ledger) == ([], ["finished"])
    with pytest.raises(KeyboardInterrupt), journal(ledger)(contest, (CPP.candidate,)):
        raise KeyboardInterrupt
    assert open_and_ended(ledger) == ([], ["finished", "KeyboardInterrupt"]), "no strike"
    with journal(ledger)(contest, (BASELINE.candidate,)):
        assert open_and_ended(ledger)[0] == []


def test_a_continued_race_is_not_journaled() -> None:
    """Do not journal a continued race: it may be paused for hours, so a power loss says nothing about its arms."""
    said: list[str] = []

    @contextmanager
    def kept(_: Any, arms: Sequence[str]) -> Iterator[None]:
        said.append(f"in {' '.join(arms)}")
        yield
        said.append("out")

    session = RaceSession(kind="screening", seed=0, arms=("base", "cpp"), pairs=(), calls_per_sample=(), voided="")

    def take(*_: Any) -> RaceSession:
        said.append("race")
        return session

    seat: Any = SimpleNamespace(
        arms=["base", "cpp"],
        plan=None,
        failures=(),
        again=0,
        watched=True,
        checked={},
        prepared={},
        sit=lambda: said.append("sit"),
        release=lambda: said.append("release"),
    )
    attempt: Any = SimpleNamespace(contest=None, plan=None, sessions=[])
    held = _held(attempt, seat, take, RaceTerms(rng=Random(1), journal=kept)).session
    assert replace(held, conditions=None) == session
    assert said == ["in base cpp", "sit", "out", "race", "release"]
