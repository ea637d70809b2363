"""Who takes the whole step stands in the ledger: raced once, served without a race until something it rests on changes.

The steps are real, their times are not: whether a race is won must not depend on this machine's mood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autosel import models, settings
from autosel.cli.main import run
from autosel.decode import race, standing, team
from autosel.decode.measure import measure
from autosel.decode.model import FUSED
from autosel.decode.race import OPS
from autosel.decode.run import DecodeRun, Plan
from autosel.decode.team import CANDIDATE
from autosel.decode.weights import load_weights
from autosel.ledger.store import Ledger, open_ledger
from autosel.values import Passed
from tests.cpu.test_decode_oracle import compiled, one_thread

__all__ = ["compiled", "one_thread"]  # fixtures

STEP_NS = 20e6


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[str]]:
    """Makes the team so many times as fast as op by op; the arms that were asked for a sample."""

    def set_ratio(ratio: float) -> list[str]:
        asked: list[str] = []
        noise = Random(3)

        def sample(self: Any, arm: str, calls: int, number: int) -> float:
            asked.append(arm)
            self.arms[arm].run()
            return STEP_NS / (ratio if arm == CANDIDATE else 1.0) * noise.gauss(1.0, 0.001)

        monkeypatch.setattr(race._Steps, "_sample", sample)
        monkeypatch.setattr(race._Steps, "probe", lambda _: 1e12)
        return asked

    return set_ratio


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger of its own; what is compiled and measured of this machine is shared."""
    made, shared = tmp_path / "home", settings.home()
    made.mkdir(mode=0o700)
    for name in ("native", "fingerprint"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (made / name).symlink_to(shared / name)
    monkeypatch.setenv("AUTOSEL_HOME", str(made))
    settings.read.cache_clear()
    yield made
    monkeypatch.undo()
    settings.read.cache_clear()


@pytest.fixture
def plan(compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """One small layer: the rules do not depend on the model."""
    monkeypatch.setattr("autosel.decode.measure.choose_chain", lambda *_: (FUSED, ()))
    whole = models.load("llama-1b")
    sizes = {"layers": 1, "d": 128, "Hq": 2, "Hkv": 1, "D": 64, "I": 256, "V": 512}
    rope = replace(whole.rope, rotary_dim=64)
    shape = replace(whole, **sizes, rope=rope, layer_types=("full",))
    return Plan(model=shape, dtype="fp32", seq=30, iters=2, warmup=0)


def measured(plan: Plan, ledger: Ledger) -> DecodeRun:
    return measure(plan, load_weights(plan), ledger=ledger)


def test_a_race_that_is_won_is_a_decision_and_the_next_run_takes_it_without_one(
    plan: Plan, home: Path, timed: Callable[[float], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = timed(1.1)
    with open_ledger() as ledger:
        first = measured(plan, ledger)
        assert first.mode_key.startswith("team.") and set(asked) == {OPS, CANDIDATE}
        (decision,) = ledger.history("step")
        evidence = ledger.evidence(decision.id)
        asked.clear()
        second = measured(plan, ledger)
        measured(replace(plan, seq=28), ledger)  # another context of the bucket
    assert decision.state == "promoted" and decision.mode.startswith("team.") and decision.arm.candidate == CANDIDATE
    assert evidence.race is not None and [s.kind for s in evidence.race.sessions] == ["screening"] + ["confirming"] * 3
    assert [type(p) for arm, p in evidence.parities if arm.digest == decision.arm.digest] == [Passed]
    assert decision.verdict is not None and decision.verdict.effect is not None
    assert decision.verdict.effect.median == pytest.approx(1.1, rel=0.01)
    assert asked == [] and second.mode_key == first.mode_key
    assert any(f"decision {decision.id}: " in note for note in second.notes)
    assert [(w.form, w.taken) for w in second.ways] == [("ops", False), ("team", True)]
    for verb in ("best", "explain", "history"):
        assert run([verb, "step"]) == 0
        said = capsys.readouterr().out
        assert "promoted" in said or "team" in said, said
    assert run(["best", "step", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "promoted"
    assert run(["explain", "step", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["stale"] == ""


def test_a_race_that_is_not_won_is_kept_and_the_next_run_does_not_ask_again(
    plan: Plan, home: Path, timed: Callable[[float], list[str]]
) -> None:
    asked = timed(0.98)
    with open_ledger() as ledger:
        first = measured(plan, ledger)
        (decision,) = ledger.history("step")
        asked.clear()
        second = measured(plan, ledger)
    assert (decision.state, decision.arm.candidate) == ("kept", OPS)
    assert asked == [] and {first.mode_key[:6], second.mode_key[:6]} == {"eager."}
    assert any("op by op" in note and f"decision {decision.id}" in note for note in second.notes)


def test_what_a_user_demotes_is_obeyed_and_another_kernel_is_raced_anew(
    plan: Plan, home: Path, timed: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = timed(1.1)
    with open_ledger() as ledger:
        measured(plan, ledger)
        (decision,) = ledger.history("step")
        ledger.demote(decision.id, "for the test")
        asked.clear()
        assert measured(plan, ledger).mode_key.startswith("eager.") and asked == []
        edited = team.arm_of
        monkeypatch.setattr(team, "arm_of", lambda *a: replace(edited(*a), digest="e" * 64))
        assert measured(plan, ledger).mode_key.startswith("team.") and asked
        assert [d.state for d in ledger.history("step")] == ["promoted", "demoted", "promoted"]


def test_a_plan_that_says_who_takes_the_step_asks_no_ledger(
    plan: Plan, home: Path, timed: Callable[[float], list[str]]
) -> None:
    asked = timed(0.5)
    with open_ledger() as ledger:
        assert measured(replace(plan, persistent=True), ledger).mode_key.startswith("team.")
        assert measured(replace(plan, persistent=False), ledger).mode_key.startswith("eager.")
        assert ledger.history("step") == [] and asked == []


def test_a_team_faster_than_memory_is_not_believed(
    plan: Plan, home: Path, timed: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1.1)
    monkeypatch.setattr(standing, "CACHES", 0)  # however small the model is
    monkeypatch.setattr(race._Steps, "probe", lambda _: 1.0)
    with open_ledger() as ledger:
        assert measured(plan, ledger).mode_key.startswith("eager.")
        (decision,) = ledger.history("step")
        raced = ledger.evidence(decision.id).race
    assert decision.verdict is not None and decision.verdict.outcome == "undecided"
    assert raced is not None and all("memory read beside it" in s.voided for s in raced.sessions)
