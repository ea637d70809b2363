"""Test how bench_busy.py counts the effects of other work on decisions, with results worked by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_busy


def row(median: float, lo: float, hi: float, winner: str = "cpp:a", outcome: str = "promote") -> dict[str, Any]:
    return {"outcome": outcome, "winner": winner, "effect": [median, lo, hi]}


UNDECIDED = {"outcome": "undecided", "winner": "torch:a", "effect": None}
REFERENCE = {name: row(2.0, 1.9, 2.1) for name in "abcde"} | {"f": UNDECIDED}


def test_decisions_are_compared_with_the_references() -> None:
    rows = {
        "a": row(2.05, 1.95, 2.2),
        "b": row(2.2, 2.1, 2.3),
        "c": row(1.5, 1.4, 1.6),
        "d": UNDECIDED,
        "e": row(1.0, 1.0, 1.0, winner="torch:a"),
        "f": row(2.0, 1.9, 2.1),
    }
    found = bench_busy.summary(rows, REFERENCE)
    assert (found["workloads"], found["decided"], found["compared"], found["cover"]) == (5, 4, 3, 1)
    assert (found["far"], found["differ"]) == (["c"], ["e"])
    assert found["worst"] == pytest.approx(1.25)


def test_ratios_at_another_read_rate_are_not_compared() -> None:
    fast, slow = ({**row(3.0, 2.9, 3.1), "read_gb_per_s": reads} for reads in ([90.0, 110.0], [55.0, 60.0]))
    assert not bench_busy.alike(fast, slow) and not bench_busy.alike(slow, fast)
    assert bench_busy.alike(fast, {"read_gb_per_s": [60.0, 100.0]}) and bench_busy.alike(row(2, 1, 3), row(2, 1, 3))
    found = bench_busy.summary({"a": fast}, {"a": slow})
    assert (found["decided"], found["compared"], found["far"]) == (1, 0, [])


def test_a_miss_is_the_factor_to_the_nearer_end_of_the_interval() -> None:
    assert bench_busy.miss(row(2.2, 2.1, 2.3), REFERENCE["a"]) == pytest.approx(1.05)
    assert bench_busy.miss(row(1.5, 1.4, 1.6), REFERENCE["a"]) == pytest.approx(1.25)
    assert bench_busy.miss(row(2.0, 1.0, 3.0), REFERENCE["a"]) == 1.0


def test_the_table_has_a_line_for_each_load_and_each_workload_that_missed() -> None:
    kept = {
        bench_busy.REFERENCE: {"load": bench_busy.REFERENCE, "rows": REFERENCE, "seconds": 60.0},
        "8": {"load": "8", "rows": {"a": row(2.0, 1.9, 2.1), "c": row(1.5, 1.4, 1.6)}, "seconds": 120.0},
    }
    _, line, off = bench_busy.text(kept).splitlines()
    assert line.split() == ["8", "2", "of", "2", "1", "of", "2", "25.0%", "1", "0", "2.0"]
    assert off.strip() == "c misses by more than 10 %"


KILLED = """
import sys, time
sys.path.insert(0, {folder!r})
import bench_busy
with bench_busy.competing(2, "import time; time.sleep(60)") as started:
    print(*started, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process that its parent has ended")
def test_competing_processes_end_when_the_benchmark_is_killed() -> None:
    folder = str(Path(bench_busy.__file__).parent)
    with subprocess.Popen([sys.executable, "-c", KILLED.format(folder=folder)], stdout=-1, text=True) as benchmark:
        assert benchmark.stdout is not None
        started = [int(pid) for pid in benchmark.stdout.readline().split()]
        assert len(started) == 2 and all(runs(pid) for pid in started)
        benchmark.kill()
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in started) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [pid for pid in started if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def runs(pid: int) -> bool:
    """Return True if the process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_workload_is_added_to_those_already_tuned_under_that_load(tmp_path: Path) -> None:
    path = tmp_path / "8.json"
    for name, seconds in (("a", 2.0), ("b", 3.0), ("a", 4.0)):
        found = {"load": "8", "rows": {name: row(seconds, 1.0, 9.0)}, "seconds": seconds}
        bench_busy.keep(path, bench_busy._joined(bench_busy._stored(path), found))
    stored = json.loads(path.read_text())
    assert stored["seconds"] == 9.0 and {n: r["effect"][0] for n, r in stored["rows"].items()} == {"a": 4.0, "b": 3.0}
