"""Count the effects of other work on decisions, by hand."""

from __future__ import annotations

import sys
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


def test_a_miss_is_the_factor_to_the_nearer_end() -> None:
    assert bench_busy.miss(row(2.2, 2.1, 2.3), REFERENCE["a"]) == pytest.approx(1.05)
    assert bench_busy.miss(row(1.5, 1.4, 1.6), REFERENCE["a"]) == pytest.approx(1.25)
    assert bench_busy.miss(row(2.0, 1.0, 3.0), REFERENCE["a"]) == 1.0


def test_the_table_has_a_line_for_each_load_and_each_workload_that_is_off() -> None:
    kept = {
        bench_busy.REFERENCE: {"load": bench_busy.REFERENCE, "rows": REFERENCE, "seconds": 60.0},
        "8": {"load": "8", "rows": {"a": row(2.0, 1.9, 2.1), "c": row(1.5, 1.4, 1.6)}, "seconds": 120.0},
    }
    _, line, off = bench_busy.text(kept).splitlines()
    assert line.split() == ["8", "2", "of", "2", "1", "of", "2", "25.0%", "1", "0", "2.0"]
    assert off.strip() == "c is far off"
