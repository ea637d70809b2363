"""Check that `run` says before it measures what is not tuned, and which command tunes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.certify import run as certify_run
from autosel.certify import run_suite
from autosel.cli.main import run
from autosel.cli.untuned import untuned_text
from autosel.decode.question import workload_of
from autosel.decode.run import Plan
from autosel.errors import AutoselError
from autosel.models.workloads import workloads

PLAN = Plan(model=models.load("llama-1b"), seq=2048)


def buckets(*, without: str = "") -> set[str]:
    step = workloads(PLAN.shape, batch=PLAN.batch, context=PLAN.seq, dtype=PLAN.dtype)
    return {w.bucket for w in step if w.op != without}


def stopped_at(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Replace a measurement by an error; return the list that then holds what was printed on stderr before it."""
    said: list[str] = []

    def measured(*_: Any) -> None:
        said.append(capsys.readouterr().err)
        raise AutoselError("measured")

    monkeypatch.setattr(module, name, measured)
    return said


def test_a_run_without_decisions_says_so_before_it_measures_and_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = stopped_at(certify_run, "certified", monkeypatch, capsys)
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path))
    assert run(["run", "--model", "llama-1b", "--seq", "2048", "--layers", "1", "--small-batch", "2"]) == 1
    assert "note: nothing is tuned for llama-1b, batch 2, context 2048" in said[0]
    assert said[0].splitlines()[-1].endswith("tune --model llama-1b --seq 2048 --batch 2")


def test_a_suite_says_it_for_each_model_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = stopped_at(run_suite, "measure_suite", monkeypatch, capsys)
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path))
    assert run(["run", "--suite", "quick", "--model", "smollm2-135m", "--layers", "1"]) == 1
    assert said[0].count("note: nothing is tuned for smollm2-135m") == 1
    assert "tune --model smollm2-135m --seq " in said[0]


def test_only_the_ops_without_a_decision_are_named() -> None:
    assert untuned_text(PLAN, buckets()) == ""
    assert untuned_text(PLAN, ()).startswith("nothing is tuned for llama-1b")
    told = untuned_text(PLAN, buckets(without="lm_head"))
    assert told.startswith("1 of ") and "(lm_head)" in told


def test_attention_at_another_length_does_not_count() -> None:
    """A step runs attention at the run's context only."""
    attention = {b for b in buckets() if b.startswith("attn/")}
    here = {b for b in attention if ".L1025-2048/" in b}
    assert untuned_text(PLAN, buckets() - attention | here) == ""
    assert "(attn)" in untuned_text(PLAN, buckets() - here)


def test_ops_of_a_step_that_is_decided_to_run_whole_are_not_named() -> None:
    whole = workload_of(PLAN.shape, PLAN.dtype, PLAN.batch, PLAN.seq).bucket
    assert untuned_text(PLAN, {whole}) == ""
    assert "nothing is tuned" in untuned_text(replace(PLAN, step="ops"), {whole})
