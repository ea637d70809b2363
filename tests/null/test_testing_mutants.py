"""Test the mutants of an op's contract and the command that scores them; tests/flows scores each op."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autosel.ops import OPS
from autosel.testing.mutants.__main__ import main
from autosel.testing.mutants.battery import digest
from autosel.testing.mutants.mutant import Mutant
from autosel.testing.mutants.trial import Trial

SEED = 26


def test_names_of_mutants_describe_the_fault_and_are_distinct() -> None:
    names = [m.name for m in Trial(OPS["rmsnorm"], "bf16", SEED).mutants]
    assert {"x narrowed to fp8", "eps taken for 1e-06", "x[:, ] the neighbour's", "result y truncated"} <= set(names)
    assert len(set(names)) == len(names) > 100


def test_a_right_mutant_survives_and_a_wrong_one_is_named_with_its_case() -> None:
    trial = Trial(OPS["swiglu"], "bf16", SEED)
    assert trial.killer(Mutant(name="right", subject="y", after=lambda results: results)) is None
    wrong = next(m for m in trial.mutants if m.name == "gate narrowed to fp8")
    found = trial.killer(wrong)
    assert found is not None
    assert found.check == "elements"
    assert found.case in {p.case.name for p in trial.points}
    assert not trial.agrees(wrong, 50, SEED)


def test_the_command_prints_the_score_and_puts_its_row_into_a_document_whose_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autosel.testing.mutants.score.killers", lambda *_, **__: {"once_7": "repeat"})
    into = tmp_path / "mutants.json"
    into.write_text(json.dumps({"ops": [{"op": "linear", "mutants": 1}, {"op": "swiglu", "mutants": 2}]}))
    assert main(["--op", "swiglu", "--seed", str(SEED), "--into", str(into)]) == 0
    assert "swiglu: " in capsys.readouterr().out
    linear, swiglu = json.loads(into.read_text())["ops"]
    assert linear == {"op": "linear", "mutants": 1}
    assert swiglu["mutants"] > 100
    assert (swiglu["seed"], swiglu["battery"]) == (SEED, digest())
