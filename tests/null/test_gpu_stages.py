"""What `./run gpu` keeps and shows: results that hold are read again, broken ones are not, tables have every stage."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from autosel.errors import UsageError
from benchmarks.gpu.__main__ import chosen, parsed, seconds
from benchmarks.gpu.kept import Kept, Record
from benchmarks.gpu.scope import Scope, scope_of
from benchmarks.gpu.stages import NAMES, stage
from benchmarks.gpu.summary import write_summary


def record(**changes: object) -> Record:
    device = {"name": "a device", "kind": "cpu", "hw_id": "0" * 64}
    made = Record(stage="parity", key="k", device=device, scope={}, git_sha="", started="2026-01-01T00:00:00+00:00")
    made.listed = ["rmsnorm cpp:rmsnorm bf16", "rmsnorm cuda:rmsnorm bf16"]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


PASSED = {"ok": True, "outcome": "passed", "cases": 42, "worst": 0.5, "seconds": 1.0}


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "out")
    kept.write(record(units={"rmsnorm cpp:rmsnorm bf16": PASSED}))
    again = kept.read("parity")
    assert again is not None
    assert again.undone == ["rmsnorm cuda:rmsnorm bf16"]
    assert again.failed == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "parity"}', '{"nobody": 1}'])
def test_a_broken_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "parity.json").write_text(text)
    assert Kept(tmp_path).read("parity") is None


def test_the_summary_names_what_failed_and_what_is_left(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    failed = {"ok": False, "outcome": "failed", "reason": "guards (two rows): it wrote outside its outputs"}
    kept.write(record(units={"rmsnorm cpp:rmsnorm bf16": failed}))
    text, clean = write_summary(kept, scope())
    assert not clean
    assert "1 failed" in text
    assert "1 left" in text
    assert "it wrote outside its outputs" in text
    assert "it wrote outside" in (tmp_path / "summary.md").read_text()


def test_all_done_and_right_is_clean(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.write(record(units={"rmsnorm cpp:rmsnorm bf16": PASSED}, listed=["rmsnorm cpp:rmsnorm bf16"]))
    assert write_summary(kept, scope())[1]


def scope(*words: str) -> Scope:
    return scope_of(parsed(["--device", "cpu", *words]))


def test_a_scope_survives_its_spelling() -> None:
    made = scope("--op", "gemv", "--op", "rmsnorm", "--seq", "256")
    assert made.ops == ("linear", "rmsnorm")
    assert Scope.from_text(made.text) == made


def test_every_stage_has_a_table_of_nothing() -> None:
    for name in NAMES:
        assert stage(name).table({}).rows == ()
        assert stage(name).UNIT_S > 0


def test_which_stages_run() -> None:
    assert chosen([], "") == list(NAMES)
    assert chosen(["bench", "parity"], "") == ["parity", "bench"]
    assert chosen([], "regret") == ["regret", "tune", "decode"]
    with pytest.raises(UsageError):
        chosen(["bench"], "tune")


@pytest.mark.parametrize(("text", "found"), [("90s", 90.0), ("5m", 300.0), ("1h", 3600.0), ("7", 7.0)])
def test_times_are_read(text: str, found: float) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "m", "-1s", "0", "nan", "inf", "5 m x"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        seconds(text)
