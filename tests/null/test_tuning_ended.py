"""Test what a tune says about workloads that stayed undecided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel.fingerprint import known
from autosel.models.workloads import Named
from autosel.tuning.ended import unfinished
from autosel.tuning.job import Report
from autosel.values import Workload
from tests.null.test_cli_headline import decided


def named(d: int) -> Named:
    w = Workload(op="rmsnorm", dims=(("M", 1), ("d", d)), dtype="bf16")
    return Named(workload=w, label="rmsnorm", calls_per_step=1)


def report(total: int, undecided: int) -> Report:
    some = tuple(named(64 * (i + 1)) for i in range(total))
    return Report(
        fingerprint=known.load("h200"),
        decisions=(),
        measured=total - undecided,
        rejected=(),
        undecided=some[:undecided],
        seconds=1.0,
        labels={n.workload.key: n.label for n in some},
    )


def test_undecided_workloads_come_with_the_meaning_of_the_exit_code() -> None:
    found = unfinished(report(3, 1), "autosel tune")
    assert found is not None and found.exit_code == 5
    assert found.what == "1 of 3 workloads; earlier decisions still serve"
    assert found.why.splitlines() == [
        "rmsnorm M1 d64: the budget ended before the race",
        "exit code 5 means undecided, not failed: the other 2 are decided and stored",
    ]
    assert found.todo == "continue:  autosel tune"


@pytest.mark.parametrize(
    ("undecided", "end"), [(2, "not failed: no workload is decided"), (1, "the other one is decided and stored")]
)
def test_a_tune_says_what_is_decided(undecided: int, end: str) -> None:
    found = unfinished(report(2, undecided), "autosel tune")
    assert found is not None and found.why.endswith(end)
    assert unfinished(report(2, 0), "autosel tune") is None


@pytest.mark.parametrize(
    ("again", "allowed", "hints"),
    [
        ("autosel tune --model m", True, ["--wait", "--realtime"]),
        ("autosel tune --model m", False, ["--wait"]),
        ("autosel tune --model m --wait", True, ["--realtime"]),
        ("autosel tune --model m --realtime", True, ["--wait"]),
        ("autosel sweep --model m", True, ["--wait"]),
    ],
)
def test_a_busy_machine_has_the_options_that_help(
    again: str, allowed: bool, hints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.race.realtime.allowed", lambda: allowed)
    undecided = report(1, 1)
    busy = decided(undecided.undecided[0], reason="machine busy: python 1.3 cores")
    found = unfinished(replace(undecided, decisions=(busy,)), again)
    assert found is not None
    first, *others = found.todo.splitlines()
    assert first == f"continue:  {again}" and [line.split()[-1] for line in others] == hints
