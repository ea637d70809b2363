"""Test the CPU time of other processes between two readings of /proc, and their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autosel.devices.cpu import neighbours
from autosel.devices.cpu.neighbours import Neighbours, Reading, between, read

TICKS = os.sysconf("SC_CLK_TCK")


def reading(tmp_path: Path, at_s: float, idle_s: float, stolen_s: float = 0.0, **used: tuple[Any, ...]) -> Reading:
    """Read a /proc of two CPUs; `used`: (pid, its parent, CPU seconds, those of ended children) by name."""
    root = tmp_path / f"at{at_s:g}"
    for name, (pid, parent, seconds, *ended) in used.items():
        folder = root / "proc" / str(pid)
        folder.mkdir(parents=True)
        rest = ["S", str(parent), *["0"] * 9, str(int(seconds * TICKS)), "0", str(int(sum(ended) * TICKS)), *["0"] * 21]
        (folder / "stat").write_text(f"{pid} ({name.replace('_', ' ')}) {' '.join(rest)}\n")
    (root / "proc").mkdir(parents=True, exist_ok=True)
    fields = [0, 0, 0, int(idle_s * TICKS), 0, 0, 0, int(stolen_s * TICKS), 0, 0]
    (root / "proc" / "stat").write_text(f"cpu  {' '.join(map(str, fields))}\ncpu0 1\ncpu1 1\nintr 5\n")
    return read(root, clock=lambda: at_s)


def test_time_neither_idle_nor_own_belongs_to_others(tmp_path: Path) -> None:
    before = reading(tmp_path, 10, 5, tune=(50, 1, 3.0), worker=(51, 50, 1.0), cc1plus=(9, 1, 0.0))
    now = reading(tmp_path, 20, 6, tune=(50, 1, 5.0), worker=(51, 50, 9.0), cc1plus=(9, 1, 9.0))
    found = between(before, now, own=50)
    assert found.cores == pytest.approx((20 - 1 - 10) / 10)
    assert found.by == ("cc1plus 0.9 cores",)
    assert found.text == "cc1plus 0.9 cores"


def test_processes_of_one_name_are_named_together_and_small_ones_not_at_all(tmp_path: Path) -> None:
    names = {"a": (3, 1, 4.0), "tune": (50, 1, 0.0), "idler": (5, 1, 0.2)}
    before, now = reading(tmp_path, 10, 5), reading(tmp_path, 20, 20, **names)
    assert between(before, now, own=50).by == ("a 0.4 cores",)


def test_a_worker_that_ended_in_the_meantime_counts_as_ours(tmp_path: Path) -> None:
    before = reading(tmp_path, 10, 5, tune=(50, 1, 3.0), worker=(51, 50, 1.0))
    now = reading(tmp_path, 20, 17, tune=(50, 1, 3.0, 9.0))
    assert between(before, now, own=50).cores == pytest.approx(0.0)  # 8 seconds busy, all the worker's


def test_stolen_time_is_separate(tmp_path: Path) -> None:
    found = between(reading(tmp_path, 10, 5), reading(tmp_path, 20, 21, stolen_s=4.0), own=50)
    assert (found.cores, found.stolen) == (pytest.approx(0.0), pytest.approx(0.2))
    assert found.text == "other guests 20 % of CPU time"


def test_a_quiet_machine_has_no_neighbours(tmp_path: Path) -> None:
    assert between(reading(tmp_path, 10, 5), reading(tmp_path, 20, 25), own=50).text == ""


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert between(read(tmp_path), read(tmp_path)) == Neighbours()


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")
def test_own_processes_are_not_neighbours_and_others_are() -> None:
    before = read()
    child = subprocess.Popen([sys.executable, "-S", "-c", "for _ in range(3 * 10 ** 6): pass"])
    child.wait()
    now = read()
    ours, theirs = between(before, now), between(before, now, own=child.pid)
    assert ours.cores < theirs.cores
    assert neighbours.TICKS_PER_S == TICKS
