"""Run `./run gpu --device cpu` through every unit of every stage, on a tiny model, with all its ops.

The regret stage takes most of the time: its cells have the sizes of real models, for any model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from autosel.ops import OPS
from tests.flows.test_benchmarks_gpu import PROOFS, RACES, SIZES, STEPS, TIMES, begun, command, dry_run
from tests.llama import write_config

STAGES = (*PROOFS, *RACES, *TIMES, *STEPS)
LIMIT_S = 5400.0
FUSED = {"norm_qkv", "gate_up"}
ATTENTION = {"attn", "paged_attn"}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return stage -> its record."""
    folder = tmp_path_factory.mktemp("gpu")
    write_config(folder / "model", **SIZES)
    done = command(folder, *dry_run(folder), "--layers", "1", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return {stage: json.loads((folder / "out" / f"{stage}.json").read_text()) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_a_dry_run_goes_through_every_unit_of_every_stage(records: dict[str, Any], stage: str) -> None:
    record = records[stage]
    assert record["units"]
    assert set(record["units"]) == set(record["listed"])
    assert all(found["ok"] for found in record["units"].values())


def test_every_op_is_covered(records: dict[str, Any]) -> None:
    assert ops_of(records, "parity") == ops_of(records, "bench") == set(OPS)
    assert ops_of(records, "sanitizer", word=1) == {*OPS, "step"}
    assert ops_of(records, "graph") == {*OPS, "a"}  # a whole step
    kernels = {unit.split(" ")[2].partition("/")[0] for unit in records["regret"]["units"]}
    assert kernels >= {"linear", *ATTENTION, *FUSED}


def ops_of(records: dict[str, Any], stage: str, word: int = 0) -> set[str]:
    """Return the ops of a stage's units, from their names: the word at this position, without the shape."""
    return {unit.split(" ")[word].partition("/")[0] for unit in records[stage]["units"]}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_verb_that_a_stage_has_started_ends_with_the_run(tmp_path: Path, end: signal.Signals) -> None:
    write_config(tmp_path / "model", **SIZES)
    running = begun(tmp_path, "out", stage="tune", unit=1)
    below = verbs_below(running.pid)
    os.kill(running.pid, end)
    _, said = running.communicate(timeout=120)
    assert end is signal.SIGKILL or (running.returncode == 130 and "the same command continues" in said)
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive


def verbs_below(pid: int) -> list[psutil.Process]:
    """Wait until `autosel tune` is a descendant and works; return all descendants."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        below = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("autosel.workers.child" in one.cmdline() for one in below):
                return below
        time.sleep(0.05)
    raise AssertionError("no verb was started")
