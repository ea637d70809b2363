"""Rehearse an upgrade: another interpreter tunes in a temporary home, and the differences are reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autosel import ops
from autosel.cli import whatif
from autosel.cli.main import run
from autosel.errors import UsageError

pytestmark = pytest.mark.usefixtures("home")


def row(candidate: str, us: float) -> dict[str, Any]:
    return {"candidate": candidate, "time_us": us, "baseline_us": 2 * us}


def test_changed_winners_come_first_and_the_gain_is_weighted_by_calls() -> None:
    here = {"a": row("cpp:a", 10.0), "b": row("cpp:b", 4.0), "c": row("cpp:c", 1.0)}
    there = {"a": row("cpp:a", 5.0), "b": row("torch:b", 8.0)}
    changes = whatif.compare(here, there, {"a": 3, "b": 1, "c": 1, "new": 1})
    assert [c.bucket for c in changes] == ["b", "a", "c", "new"]
    assert [c.flips for c in changes] == [True, False, False, False]
    assert changes[0].gain == 0.5 and changes[1].gain == 2.0 and changes[2].gain is None
    told = whatif.summary(changes)
    assert told[0] == "1 of 4 would be served by another kernel"
    assert f"{(30 + 4) / (15 + 8):.2f}x" in told[1]
    assert changes[3].here == "(undecided)"


def test_workloads_left_undecided_by_the_budget_are_not_flips() -> None:
    norms = [ops.find("rmsnorm").workload("bf16", {"M": 1, "d": d}) for d in (64, 96)]
    decisions = [{"bucket": w.bucket, **row("torch:rmsnorm", 9.0)} for w in norms]
    there = whatif.decided_there(decisions, [norms[0].key], norms)
    assert set(there) == {norms[1].bucket}
    here = {w.bucket: row("cpp:rmsnorm", 1.0) for w in norms}
    changes = {c.bucket: c for c in whatif.compare(here, there, {w.bucket: 1 for w in norms})}
    assert changes[norms[1].bucket].flips and not changes[norms[0].bucket].flips


def test_an_environment_that_cannot_run_autosel_is_reported_with_missing_packages(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    with pytest.raises(UsageError, match="cannot run autosel") as caught:
        whatif.ask(bare)
    assert "No module named" in caught.value.why and "pip install" in caught.value.todo
    with pytest.raises(UsageError, match="cannot run"):
        whatif.ask(tmp_path / "absent")


def test_no_decisions_and_no_recording_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", "--python", sys.executable]) == 1
    assert "no workload to try" in capsys.readouterr().err
