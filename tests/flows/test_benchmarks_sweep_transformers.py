"""Patch tiny models of transformers' classes: a daily sample, with all kinds of outcome of the whole sweep."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_a_process_that_dies_fails_only_its_class(sweep: Any) -> None:
    rows = sweep.sweep(["NoSuchForCausalLM", "LlamaForCausalLM"], 1)
    assert [(row.name, row.outcome) for row in rows] == [
        ("LlamaForCausalLM", "patched"),
        ("NoSuchForCausalLM", "not built"),
    ]
    worker = sweep._started()
    worker.kill()
    assert sweep._asked_of(worker, "LlamaForCausalLM") is None
    worker.wait()


def test_the_bound_of_a_logit_follows_the_bounds_of_the_ops(sweep: Any) -> None:
    """Move results by their bounds with independent signs per element, and with one sign per row."""
    generator = torch.Generator().manual_seed(1)
    bound = torch.ones(4, 64)
    by_element, by_row = sweep._by_element(generator)(bound), sweep._by_row(generator)(bound)
    assert set(by_element.unique().tolist()) == {-1.0, 1.0}
    assert by_row.shape == (4, 1) and set(by_row.abs().unique().tolist()) == {1.0}


def test_the_summary_counts_all_classes(sweep: Any) -> None:
    rows = [
        sweep.Row(name="A", outcome="patched", calls=10, served=8, passes=1, difference=1.0, bound=2.0),
        sweep.Row(name="B", outcome="patched", calls=10, served=7, passes=1, bound=1.0),
        sweep.Row(name="C", outcome="refused", reason="mixes dtypes"),
        sweep.Row(name="D", outcome="not built", reason="no such size"),
    ]
    told = sweep.table(rows)
    assert "4 classes: 2 patched, 1 refused, 1 not built" in told
    assert "1 (25%) with at least 80%" in told
    assert "mixes dtypes" in told
