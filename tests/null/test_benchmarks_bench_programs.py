"""Test how bench_programs.py judges cells and ops, with results worked by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_programs


def certificate(baseline_ms: list[float], optimised_ms: list[float]) -> dict[str, Any]:
    samples = {"baseline_ns": [t * 1e6 for t in baseline_ms], "optimised_ns": [t * 1e6 for t in optimised_ms]}
    return {"samples": samples, "ways": [{"form": "ops", "taken": False}, {"form": "whole", "taken": True}]}


def test_a_cell_is_slower_if_its_whole_interval_is_below_one() -> None:
    found = bench_programs.judged(certificate([9.9] * 20, [10.0] * 20))
    assert found["slower"] and found["interval"] == pytest.approx([0.99, 0.99])
    assert found["ways"] == ["whole"]


def test_a_cell_is_slower_if_its_median_is_far_below_one() -> None:
    baseline = [9.5] * 11 + [12.0] * 9
    assert bench_programs.judged(certificate(baseline, [10.0] * 20))["slower"]


def test_noise_around_one_is_not_slower() -> None:
    found = bench_programs.judged(certificate([9.9, 10.1] * 10, [10.0] * 20))
    assert not found["slower"]
    assert found["ratio"] == pytest.approx(1.0)


def test_few_pairs_give_no_interval() -> None:
    found = bench_programs.judged(certificate([10.0] * 4, [10.0] * 4))
    assert found["interval"] == [0.0, float("inf")]


def test_the_goals_of_an_op_are_named_where_it_misses_them() -> None:
    times = {
        "back to back": {"median": 10.0, "p90": 13.0},
        "after a product": {"median": 14.0, "p90": 15.0},
        "after 1 ms": {"median": 45.0, "p90": 50.0},
        "after 20 ms": {"median": 150.0, "p90": 200.0},
    }
    found = bench_programs.misses({"us": times})
    assert found == ["p90 1.30 times the median", "after 1 ms +35 us"]


def test_the_table_counts_slower_and_failed_cells() -> None:
    cells = {
        "a 128 x1": bench_programs.judged(certificate([20.0] * 20, [10.0] * 20)),
        "b 128 x1": bench_programs.judged(certificate([9.0] * 20, [10.0] * 20)),
        "c 128 x1": {"failed": "no memory"},
    }
    text = bench_programs.text_of_steps(cells)
    assert "2.00x (2.00 .. 2.00)" in text and "SLOWER" in text
    assert text.endswith("1 of 2 cells slower; 1 failed")
