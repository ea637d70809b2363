"""Test the share of time that decisions serve: what counts as served, where times come from, and why calls miss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch, ops
from autosel.devices import ids_of, this_device
from autosel.dispatch import served
from autosel.dispatch.served import Coverage, document, measure, outlook
from autosel.integrations import engine_ops
from autosel.ledger.key import at_threads, current_mode, serving_key
from autosel.ledger.snapshot import Row
from autosel.values import ELSEWHERE, Decision, PythonRecipe, Rate, ServedCalls, Timing, Workload, to_json
from tests.null.test_dispatch import WEIGHT, W, X, baseline, decision, publish, python_arm

MINE = python_arm("user:mine", PythonRecipe(target="autosel.ops.eager:swiglu"))
HERE = this_device().hw_id
UNDECIDED = W.at(d=96)
OTHER_MODE = at_threads(current_mode(), torch.get_num_threads() + 6)


def timed(w: Workload = W, mine_us: float = 2.0, baseline_us: float = 6.0, **changes: Any) -> Decision:
    made = decision(w, MINE, **changes)
    times = {MINE.candidate: mine_us, made.baseline.candidate: baseline_us}
    timings = {n: Timing(median_us=us, lo_us=us, hi_us=us, p95_us=us, min_us=us, samples=9) for n, us in times.items()}
    assert made.verdict is not None
    return dataclasses.replace(made, verdict=dataclasses.replace(made.verdict, timings=timings))


def rows(*decisions: Decision) -> list[Row]:
    keys = [serving_key(d.hw_id, d.mode, d.bucket, d.length_range) for d in decisions]
    return [Row(key=key, epoch=1, document=to_json(d)) for key, d in zip(keys, decisions, strict=True)]


def of(counted: dict[Any, int], *decisions: Decision) -> Coverage:
    return measure(counted, rows(*decisions), engine="vLLM 1", mode=current_mode())


def missed(w: Workload | str, reason: str) -> tuple[Any, ...]:
    return w, ELSEWHERE, None, reason, HERE


def test_the_share_is_of_time_and_not_of_calls() -> None:
    other = timed(W.at(d=32), 9.0, 30.0, id=42)
    ours, left = (W, MINE.candidate, 41, "won", HERE), missed(other.workload, "kept")
    found = of({ours: 5, left: 1}, timed(), other)
    assert found.share == pytest.approx(10 / 40) and found.engine == "vLLM 1"
    assert [(p.why, p.us_per_call, p.origin) for p in found.parts] == [("kept", 30.0, "raced"), ("", 2.0, "raced")]


def test_the_baseline_of_a_stale_decision_does_not_count_as_served() -> None:
    """Count no service for a stale or quarantined decision: the baseline runs, with the baseline's time."""
    fallback = (W, baseline("rmsnorm").candidate, 41, "stale: torch changed", HERE)
    (part,) = of({fallback: 2}, timed()).parts
    assert (part.why, part.us_per_call) == ("stale: torch changed", 6.0)


def test_the_time_of_a_miss_is_taken_from_a_race_under_other_conditions() -> None:
    (part,) = of({missed(W, "tuned with 8 threads, running with 2"): 1}, timed(mode=OTHER_MODE)).parts
    assert (part.us_per_call, part.origin) == (6.0, "raced under other conditions")


def test_without_a_race_the_time_is_the_least_that_moving_the_bytes_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = {f"read_bytes_per_s@{min(torch.get_num_threads(), this_device().cpus)}": 1e9}
    rates = {name: Rate(value=value, unit="B/s", spread=0.0, source="") for name, value in rate.items()}
    monkeypatch.setattr(served, "of_hardware", lambda hw_id: dataclasses.replace(this_device(), rates=rates))
    (part,) = of({missed(UNDECIDED, "no decision"): 1}).parts
    assert (part.us_per_call, part.origin) == (ops.find("rmsnorm").bytes_moved(UNDECIDED) / 1e3, "derived")
    monkeypatch.setattr(served, "of_hardware", lambda hw_id: None)
    found = of({missed(UNDECIDED, "no decision"): 1, missed("rmsnorm", "fp64"): 3})
    assert found.share is None and {p.origin for p in found.parts} == {"unknown"}


def test_a_report_has_the_parts_with_the_most_time_and_counts_the_rest() -> None:
    parts = [ServedCalls(op="rmsnorm", bucket=str(n), candidate="c", why="", calls=n, us_per_call=1.0, origin="raced")
             for n in (5, 3, 2)]  # fmt: skip
    told = document(Coverage(engine="", mode="m", parts=tuple(parts)), most=1)
    assert [p["bucket"] for p in told["parts"]] == ["5"] and told["left_out"] == 5 and told["share"] == 1.0


def test_a_process_reports_what_it_called(tmp_path: Path) -> None:
    publish(tmp_path, [timed(mode=OTHER_MODE)])
    with dispatch.use(tmp_path), torch.inference_mode():
        for _ in range(3):
            assert engine_ops.norm(X, WEIGHT, 1e-6) is None
        (part,) = dispatch.coverage().parts
    assert (part.calls, part.us_per_call, part.origin) == (3, 6.0, "raced under other conditions")
    assert part.why.startswith("tuned with ")


def test_a_decision_for_the_baseline_is_left_to_the_engine_with_the_reason(tmp_path: Path) -> None:
    publish(tmp_path, [decision(W, baseline("rmsnorm"), state="kept", reason="a tie")])
    with dispatch.use(tmp_path), torch.inference_mode():
        assert engine_ops.norm(X, WEIGHT, 1e-6) is None
        (part,) = dispatch.coverage().parts
    assert part.why == "kept: a tie"


def test_the_outlook_counts_decisions_for_this_process_and_for_other_numbers_of_threads() -> None:
    made = [timed(), timed(W.at(d=32), id=2), timed(mode=OTHER_MODE, id=3), timed(hw_id="0" * 64, id=4)]
    made.append(dataclasses.replace(decision(UNDECIDED, baseline("rmsnorm"), id=5), state="kept"))
    threads = torch.get_num_threads() + 6
    mode = current_mode()
    assert outlook(rows(*made), ids_of(this_device()), mode) == (
        f"decided for {mode}: rmsnorm 2; 1 decisions for {threads} threads"
    )
    assert outlook([], ids_of(this_device()), mode) == f"decided for {mode}: nothing"
