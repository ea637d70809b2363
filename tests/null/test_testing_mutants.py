"""Test that mutants of each contract are refused, and that some pass if the battery lacks a domain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.testing.mutants.__main__ import main
from autosel.testing.mutants.battery import digest
from autosel.testing.mutants.equivalent import REASONS
from autosel.testing.mutants.mutant import Mutant
from autosel.testing.mutants.score import score
from autosel.testing.mutants.trial import Trial

SEED = 26
SHARE = 0.12  # share of drawn mutants; tests/soak/test_mutants.py runs all
SHARE_OF_ATTENTION = 0.08  # whose references take long
POINTS = 100

by_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


@by_op
def test_every_mutant_is_killed_or_is_a_right_kernel(op: Op) -> None:
    share = SHARE_OF_ATTENTION if op.name in ("attn", "paged_attn", "prefill_attn") else SHARE
    found = score(op, SEED, share=share, points=POINTS, calls=False)
    assert found.survived == []
    assert found.mutants >= 10
    assert len(found.equivalent) <= 1
    assert sum(found.killed.values()) + len(found.equivalent) == found.mutants


def test_a_mutant_that_agrees_has_a_reason_only_if_it_exists() -> None:
    for op, name in REASONS:
        assert name in {m.name for m in Trial(OPS[op], "bf16", SEED).mutants}, f"{op} has no mutant {name!r}"


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


def test_the_command_prints_the_score_and_its_exit_code_shows_survivors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.testing.mutants.score.killers", lambda *_, **__: {"once_7": "repeat"})
    assert main(["--op", "swiglu", "--seed", str(SEED)]) == 0
    assert capsys.readouterr().out.startswith("swiglu: ")


def test_rows_are_put_into_a_stored_document_with_seed_and_state_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.testing.mutants.score.killers", lambda *_, **__: {"once_7": "repeat"})
    into = tmp_path / "mutants.json"
    into.write_text(json.dumps({"ops": [{"op": "linear", "mutants": 1}, {"op": "swiglu", "mutants": 2}]}))
    assert main(["--op", "swiglu", "--seed", str(SEED), "--into", str(into)]) == 0
    linear, swiglu = json.loads(into.read_text())["ops"]
    assert linear == {"op": "linear", "mutants": 1}
    assert swiglu["mutants"] > 100
    assert (swiglu["seed"], swiglu["battery"]) == (SEED, digest())
