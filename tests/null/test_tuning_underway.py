"""Test that other processes of a home see the commands that run, and none that has ended."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from autosel.cli.progress import Progress
from autosel.tuning.underway import FOLDER, MOST_BYTES, RunningCommand, Underway, commands

TUNE = RunningCommand(command="autosel tune --model llama-8b", pid=7, started_at="2026-11-26T01:00:00+00:00")
KILLED = """
import os, sys
from pathlib import Path
from autosel.tuning.underway import RunningCommand, Underway
Underway(Path(sys.argv[1])).show(RunningCommand(command="x", pid=1, started_at="2026-11-26T01:00:00+00:00"))
os._exit(9)
"""


def test_a_command_is_seen_from_its_begin_to_its_end(tmp_path: Path) -> None:
    mine = Underway(tmp_path)
    assert commands(tmp_path) == []
    for done in (0, 1000, 3):
        shown = dataclasses.replace(TUNE, stage="parity", done=done, total=1000, decided=2, left_s=40.0)
        mine.show(shown)
        assert commands(tmp_path) == [shown]
    mine.close()
    assert commands(tmp_path) == []
    assert list(tmp_path.joinpath(*FOLDER).iterdir()) == []


def test_a_killed_command_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert ended.returncode == 9
    assert len(list(tmp_path.joinpath(*FOLDER).iterdir())) == 1
    assert commands(tmp_path) == []
    assert list(tmp_path.joinpath(*FOLDER).iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{", b'{"command": 7}', b"\xff" * MOST_BYTES])
def test_files_that_are_no_commands_are_passed_over(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path.joinpath(*FOLDER)
    folder.mkdir(parents=True)
    (folder / "12.json").write_bytes(text)
    (folder / "13.json").symlink_to("/dev/zero")
    assert commands(tmp_path) == []


def test_a_home_that_cannot_be_written_stops_no_command(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    mine = Underway(tmp_path)
    mine.show(TUNE)
    mine.close()
    assert commands(tmp_path) == []


def test_the_progress_of_a_tune_is_seen(home: Path) -> None:
    with Progress(command="autosel tune --model llama-8b") as shown:
        shown.stage("screening", "attn", 3, 12)
        shown.show()
        (found,) = commands(home)
        assert (found.command, found.stage, found.done, found.total) == (
            "autosel tune --model llama-8b", "screening", 3, 12,
        )  # fmt: skip
    assert commands(home) == []
