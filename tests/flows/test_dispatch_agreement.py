"""Test that ranks of a job refuse to differ: jobs of 2 and 4 processes with gloo, on equal and different homes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch
from autosel.dispatch.agreement import compare, standing
from autosel.errors import UsageError
from autosel.values import PythonRecipe
from tests.null.test_dispatch import ROOT as CHECKOUT
from tests.null.test_dispatch import WEIGHT, W, X, decision, publish, python_arm

RANK = """
import json, sys, torch, autosel
from autosel import dispatch
from autosel.dispatch.agreement import Disagreement
from torch import distributed
torch.set_num_threads(int(sys.argv[1]))
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]),
                               world_size=int(sys.argv[4]))
try:
    found = autosel.agree()
except Disagreement as error:
    print(json.dumps({"refused": error.why}))
else:
    print(json.dumps({"ranks": len(found.standings), "digest": dispatch.board().digest}))
distributed.barrier()
distributed.destroy_process_group()
"""
MINE = python_arm("user:mine", PythonRecipe(target="autosel.ops.eager:swiglu"))


def processes(
    words: Sequence[Sequence[str]], homes: Sequence[Path], **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run one process for each home at the same time; wait for all."""
    started = [
        subprocess.Popen(
            own,
            cwd=CHECKOUT,
            env={**os.environ, "AUTOSEL_HOME": str(home), "RANK": str(rank), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (own, home) in enumerate(zip(words, homes, strict=True))
    ]
    said = [one.communicate(timeout=240) for one in started]
    return [subprocess.CompletedProcess(p.args, p.returncode, *s) for p, s in zip(started, said, strict=True)]


def job(folder: Path, homes: Sequence[Path], threads: Sequence[int]) -> list[dict[str, Any]]:
    """Return the output of each rank."""
    size = str(len(homes))
    words = [[sys.executable, "-c", RANK, str(n), str(folder / "store"), str(r), size] for r, n in enumerate(threads)]
    done = processes(words, homes)
    assert all(one.returncode == 0 for one in done), "".join(one.stderr for one in done)
    return [json.loads(one.stdout) for one in done]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    publish(tmp_path / "home", [decision(W, MINE)])
    return tmp_path / "home"


@pytest.fixture
def other(tmp_path: Path, home: Path) -> Path:
    """Return another home with one more decision."""
    shutil.copytree(home, tmp_path / "other")
    publish(tmp_path / "other", [decision(W, MINE), decision(W.at(d=32), MINE, id=42)])
    return tmp_path / "other"


def test_ranks_with_the_same_decisions_agree(tmp_path: Path, home: Path) -> None:
    said = job(tmp_path, [home] * 4, [1] * 4)
    assert [one["ranks"] for one in said] == [4] * 4
    assert len({one["digest"] for one in said}) == 1 and len(said[0]["digest"]) == 64


def test_every_rank_refuses_and_names_the_one_with_other_decisions(tmp_path: Path, home: Path, other: Path) -> None:
    said = job(tmp_path, [home, other, home], [1, 1, 1])
    assert len({one["refused"] for one in said}) == 1
    (line,) = said[0]["refused"].splitlines()
    assert line.startswith("rank 1 on ") and ": snapshot " in line and " instead of " in line


def test_another_number_of_threads_is_named(tmp_path: Path, home: Path) -> None:
    said = job(tmp_path, [home, home], [1, 2])
    assert all("rank 1 on " in one["refused"] and "mode eager.t2." in one["refused"] for one in said)


def test_without_a_process_group_nothing_is_compared(home: Path) -> None:
    with dispatch.use(home), pytest.raises(UsageError, match="no process group"):
        dispatch.agree()


def test_of_two_equally_large_groups_the_one_with_the_lowest_rank_is_the_reference(home: Path, other: Path) -> None:
    with dispatch.use(home) as one, dispatch.use(other) as two:
        a, b = standing(one), standing(two)
    assert [line.split()[1] for line in compare([a, b]).differences] == ["1"]
    assert [line.split()[1] for line in compare([a, b, b]).differences] == ["0"]
    assert compare([a, a]).differences == ()


def test_a_board_that_is_held_keeps_its_snapshot(home: Path) -> None:
    with dispatch.use(home) as board:
        before = board.digest
        board.hold()
        publish(home, [decision(W, MINE), decision(W.at(d=32), MINE, id=42)], epoch=9)
        board.refresh()
        assert board.digest == before
        assert dispatch.best("rmsnorm", like=(torch.ones(2, 32), torch.ones(32))).decision is None
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).decision is not None


def test_doctor_shows_all_ranks_once_and_fails_on_each_if_they_differ(home: Path, other: Path) -> None:
    words = [sys.executable, "-P", "-m", "autosel.cli.main", "doctor", "--ranks"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(CHECKOUT)}
    first, second = processes([words] * 2, [home, other], **place)
    assert (first.returncode, second.returncode) == (1, 1), first.stderr + second.stderr
    assert "rank 1 on " in first.stdout and " instead of " in first.stdout and second.stdout == ""


def test_doctor_outside_a_job_says_how_to_start_one(home: Path) -> None:
    words = [sys.executable, "-P", "-m", "autosel.cli.main", "doctor", "--ranks"]
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environment |= {"AUTOSEL_HOME": str(home), "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun" in done.stderr
