"""Patch a tiny model of every class of transformers that generates text."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the `hf` extra")


def test_every_class_is_right_after_patching_and_most_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    sweep = importlib.import_module("sweep_transformers")
    rows = sweep.sweep(sweep.names(), jobs=2)
    assert not [row for row in rows if row.outcome in ("wrong", "failed")], sweep.table(rows)
    assert sum(row.reaches for row in rows) >= sweep.CLASSES_GOAL * len(rows), sweep.table(rows)
