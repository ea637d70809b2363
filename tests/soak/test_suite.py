"""Run the full suite on this machine: three families, a warm-up and eight trials of each configuration.

Answers are an eighth as long, because a probe of memory runs between two steps: with full answers of tiny steps, the
probes would take an hour."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autosel.certify import compare, suite
from tests.cpu.test_decode_passes import FAMILIES
from tests.flows.test_cli_run import verb
from tests.llama import write_config


def test_a_full_suite_runs_to_its_end_and_every_row_of_it_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "sliding_window": 96}
    for family, changes in FAMILIES.items():
        write_config(tmp_path / family, **(changes | small))
    models = tuple(str(tmp_path / family) for family in FAMILIES)
    monkeypatch.setitem(suite.LEVELS, "full", replace(suite.LEVELS["full"], models=models, shorter=8))
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))
    made, report = tmp_path / "suite.jsonl", tmp_path / "suite"
    found = verb("run", "--suite", "full", "--certify", str(made), "--report", str(report))
    rows = found["suite"]["rows"]
    assert [(Path(r["model"]).name, r["configuration"], r["tokens"]) for r in rows] == [
        (family, c.name, c.tokens) for family in FAMILIES for c in suite.configurations("full")
    ]
    assert found["error"] is None and found["suite"]["left"] == 0 and found["suite"]["trials"] == 8
    assert all(r["ttft_ms"] > 0 and r["p95_step_ms"] >= r["p50_step_ms"] > 0 and r["cache_bytes"] > 0 for r in rows)
    assert verb("verify", str(made))["certificates"] == len(rows) == 21
    before = compare.read(report)
    assert [c.speedup for c in compare.compare(before, before)] == [1.0] * 21
