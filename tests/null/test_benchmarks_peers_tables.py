"""Test the comparison tables: sums computed by hand; missing measurements are named, never shown as a number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import peers_tables as tables

TIMES = {
    "cpp:gemv threads=1 rows=4": [10.0, 10.0, 10.0, 10.0],
    "cpp:gemv threads=2 rows=4": [11.0, 12.0, 11.0, 12.0],
    "ATEN": [40.0, 40.0, 40.0, 40.0],
    "Inductor ATEN": [44.0, 44.0, 44.0, 44.0],
    "Inductor CPP": [22.0, 22.0, 22.0, 22.0],
}
PLANTED: dict[str, Any] = {
    "wrong": ["native_zeros", "native_flaky", "native_trap"],
    "right": ["native_right"],
    tables.AUTOSEL: dict.fromkeys(("native_zeros", "native_flaky", "native_trap"), "caught: elements")
    | {"native_right": "believed"},
    tables.KERNEL_TUNER: {
        "native_zeros": "caught: answer",
        "native_flaky": "believed",
        "native_trap": "died: exit code -11",
        "native_right": "believed",
    },
}


def run(pick: str, seconds: float) -> dict[str, Any]:
    return {"pick": pick, "seconds": seconds}


def document(**changes: Any) -> dict[str, Any]:
    picks = ["cpp:gemv threads=1 rows=4"] * 3 + ["cpp:gemv threads=2 rows=4"]
    made = {
        "shape": [8, 4],
        "device": "this one",
        "date": "2026-01-01",
        "versions": {"torch": "2"},
        "runs": {
            tables.AUTOSEL: [run(picks[0], 9.0)] * 4,
            tables.INDUCTOR: [run("Inductor ATEN", 5.0)],
            tables.KERNEL_TUNER: [run(p, float(n)) for n, p in enumerate(picks, 1)],
        },
        "judged": {"us": TIMES},
        "planted": PLANTED,
    }
    return made | changes


def test_a_flip_is_a_process_that_differs_from_the_most_common_choice() -> None:
    assert tables.flips(["a", "a", "b", "a"]) == 0.25
    assert tables.flips(["a"]) == 0.0


def test_regret_is_over_the_best_of_the_other_half_of_the_rounds() -> None:
    found = tables.regrets(TIMES, [name for name in TIMES if name.startswith("cpp:")])
    assert found["cpp:gemv threads=1 rows=4"] == 0.0
    assert found["cpp:gemv threads=2 rows=4"] == pytest.approx((1.1 + 1.2) / 2 - 1)


def test_each_tuner_is_held_against_its_own_candidates_and_against_all() -> None:
    text = tables.tune(document())
    assert "| 4 | 9.0 (9.0 .. 9.0) | cpp:gemv threads=1 rows=4 (4) | 0% | 0.0% (worst 0.0%)" in text
    assert "| 25% | 3.7% (worst 15.0%) |" in text
    assert "2.5 (1.0 .. 4.0)" in text and "100.0% (worst 100.0%) | 340.0% (worst 340.0%)" in text
    assert f"| {tables.KERNEL_TUNER} | 1 | 1 | 1 | 0 of 1 |" in text


def test_missing_measurements_are_not_covered() -> None:
    found = document(planted={**PLANTED, tables.KERNEL_TUNER: {}})
    found["runs"][tables.KERNEL_TUNER] = []
    text = tables.tune(found)
    assert f"| {tables.KERNEL_TUNER} | 0 | not covered |" in text
    assert f"| {tables.KERNEL_TUNER} | not covered |" in text
    assert f"| {tables.INDUCTOR} | not covered: it compares no outputs |" in text
    assert "believed:" not in text
    assert "%" not in tables.tune(document(judged={})).split("| 4 |")[1].split("|")[4]


def test_a_void_or_missing_peer_of_the_dispatch_table_has_a_reason_and_no_number() -> None:
    way = {"us": 1.0, "over_us": 0.5, "low_us": 0.4, "high_us": 0.6, "ratio": 2.0}
    found = {
        "device": "this one", "versions": {"torch": "2"}, "date": "2026-01-01", "control": 1.01,
        "limits_us": {"autosel, bound": 0.1, "autosel, by shape": 1.0},
        "ways": {"direct": way, "autosel, bound": way, "autosel, by shape": way, "other": way},
        "not_covered": {"vLLM CustomOp": "vllm is not installed"},
    }  # fmt: skip
    text = tables.dispatch(found)
    assert "| autosel, bound | 0.500 | 0.400 .. 0.600 | <= 0.1: missed |" in text
    assert "| autosel, by shape | 0.500 | 0.400 .. 0.600 | <= 1: reached |" in text
    assert "| vLLM CustomOp | not covered | vllm is not installed | |" in text and "| direct" not in text
