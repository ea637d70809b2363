"""Patch tiny models of transformers' classes: a daily sample, with all kinds of outcome of the whole sweep."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import drawn

pytest.importorskip("transformers", reason="needs the `hf` extra")
SAMPLE = 8


@pytest.fixture(scope="module")
def sweep() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
        yield importlib.import_module("sweep_transformers")


def test_a_sample_of_the_classes_is_right_after_patching_or_refused_with_a_reason(sweep: Any) -> None:
    names = sweep.names()
    assert len(names) > SAMPLE and "LlamaForCausalLM" in names
    rows = [sweep.swept(drawn.todays(names, shift)) for shift in range(SAMPLE)]
    assert not [row for row in rows if row.outcome in ("wrong", "failed")], sweep.table(rows)
    for row in rows:
        assert row.outcome == "patched" or row.reason
        assert "AttributeError" not in row.reason or row.outcome == "not built"
        assert row.outcome != "patched" or 0 < row.served <= row.calls


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Mamba2ForCausalLM"])
def test_all_linear_and_norm_calls_of_common_classes_are_served(sweep: Any, name: str) -> None:
    row = sweep.swept(name)
    assert (row.outcome, row.served, row.passes) == ("patched", row.calls, 1 + sweep.STEPS)
    assert 0.0 < row.worst < 1.0 and row.bound < 1e-2
    assert row.open_tokens < row.tokens == sweep.PROMPT + sweep.STEPS


def test_a_result_that_is_wrong_only_for_prompts_is_found(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check prompts too, because the proof of a layer has one row, so `patch` accepts such a layer."""
    original = sweep.Moving.selection

    def planted(self: Any, op: Any) -> Any:
        inner = original(self, op)
        return lambda *values: inner(*values) * (1.01 if op.name == "linear" and len(values[0]) > 1 else 1.0)

    def plant(self: Any, op: Any) -> Any:
        return planted(self, op) if op.name == "linear" else original(self, op)

    monkeypatch.setattr(sweep.Moving, "selection", plant)
    row = sweep.swept("LlamaForCausalLM")
    assert row.outcome == "wrong" and "differs by more than its bound" in row.reason
