"""Test the spread of repeated tunes: which decisions are runs of the same arms, and that they widen an interval."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autosel.ledger.commands import Demote
from autosel.ledger.store import open_ledger
from autosel.race import reruns
from autosel.race.judge import judge
from autosel.values import Effect, Reruns, Verdict
from tests.cpu.test_ledger import ATTN, CPP, FP, PACKED, PASSED, record, verdict
from tests.null.test_race_judge import run_race


def of_run(median: float, read_bytes_per_s: float = 0.0) -> Verdict:
    effect, wins = Effect(median=median, lo=median, hi=median), ((14, 14),) * 3
    return replace(verdict(), effect=effect, wins=wins, read_bytes_per_s=read_bytes_per_s)


def spread(home: Path) -> Reruns:
    with open_ledger(home=home) as ledger:
        return reruns.of(ledger.history(hw_id=FP.hw_id, limit=reruns.REMEMBERED))


def test_runs_of_the_same_arms_give_the_variance_of_their_difference(home: Path) -> None:
    step = 0.1
    with open_ledger(home=home) as ledger:
        for key, power in enumerate((0, 1, 2)):
            record(ledger, f"a{key}", verdict=of_run(math.exp(power * step)))
        longer = replace(ATTN, dims=(*ATTN.dims[:-1], ("L", 4096)))
        for key, power in enumerate((5, 6)):
            record(ledger, f"b{key}", workload=longer, verdict=of_run(math.exp(power * step)))
    # squares about the mean: 2 of .1^2, and 2 of .05^2; 2 + 1 degrees of freedom; twice for a difference
    assert spread(home).degrees == 3
    assert spread(home).variance == pytest.approx(2 * (2 * 0.01 + 2 * 0.0025) / 3)


def test_other_arms_and_verdicts_that_were_not_confirmed_are_no_further_run(home: Path) -> None:
    with open_ledger(home=home) as ledger:
        record(ledger, "one", verdict=of_run(2.0))
        for key, arm in (("other arm", PACKED), ("edited", replace(CPP, digest="e" * 64))):
            made = replace(of_run(3.0), winner=arm.candidate)
            record(ledger, key, arm=arm, parities=[(arm, PASSED)], verdict=made)
        record(ledger, "threads", mode="other", verdict=of_run(3.0))
        record(ledger, "screened", verdict=replace(of_run(3.0), wins=()))
    assert spread(home) == Reruns()


def test_a_demotion_repeats_a_verdict_and_is_no_further_run(home: Path) -> None:
    with open_ledger(home=home) as ledger:
        made = record(ledger, verdict=of_run(2.0))
        ledger.write(Demote(decision_id=made.id, reason="a NaN was seen"))
    assert spread(home) == Reruns()


def test_runs_in_two_states_of_the_memory_are_not_compared(home: Path) -> None:
    with open_ledger(home=home) as ledger:
        for key, (median, rate) in enumerate(((2.0, 60e9), (4.6, 36e9), (2.1, 62e9))):
            record(ledger, str(key), verdict=of_run(median, rate))
    assert spread(home).degrees == 1
    assert spread(home).variance == pytest.approx(math.log(2.1 / 2.0) ** 2)


def test_an_interval_is_as_wide_as_repeated_tunes_were_apart() -> None:
    race = run_race({"base": 2e6, "fast": 1e6})
    alone = judge(race).effect
    widened = judge(replace(race, reruns=Reruns(degrees=40, variance=0.06**2))).effect
    assert alone is not None and widened is not None
    assert widened.median == alone.median
    assert alone.hi / alone.lo < 1.05 < 1.2 < widened.hi / widened.lo
