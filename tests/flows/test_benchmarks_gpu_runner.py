"""Test how `./run gpu` runs a stage: timeouts, budgets, deaths, and repeated units. The stage's process is a script
that does not measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.kept import RunFolder, StageResult
from benchmarks.gpu.runner import Child, run_stage
from benchmarks.gpu.scope import Scope, scope_of
from benchmarks.gpu.summary import write_summary

# Lists its units, then answers by their names; each start leaves a line in FILE.
SCRIPT = """
import json, os, signal, sys
file, key, *units = sys.argv[1:]
open(file, "a").write("started\\n")
device = {"name": "a device", "kind": "cpu", "hw_id": "0" * 64}
print(json.dumps({"listed": units, "key": key, "device": device}), flush=True)
coming = json.loads(sys.stdin.readline() or "[]")
for line in sys.stdin:
    unit = line.strip()
    if unit == "hangs":
        signal.pause()
    if unit == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    fails = unit.startswith("fails") and open(file).read().count("started") < 2
    found = {"ok": not fails, "error": "a reason"} if fails else {"ok": True}
    print(json.dumps({**found, "pid": os.getpid(), "coming": coming, "leaving": unit == "breaks"}), flush=True)
"""


@pytest.fixture
def scope(tmp_path: Path) -> Scope:
    return scope_of(parsed(["--device", "cpu", "--out", str(tmp_path / "out")]))


class Stage:
    """A stage with these units."""

    def __init__(self, folder: Path, scope: Scope, patch: pytest.MonkeyPatch) -> None:
        self.file, self.scope, self.kept = folder / "starts", scope, RunFolder(Path(scope.out))
        self.patch = patch

    def run(self, *units: str, **options: object) -> StageResult:
        """Run the stage with the script instead of its own process."""
        start = Child._start

        def begin(child: Child) -> None:
            child.command = [sys.executable, "-c", SCRIPT, str(self.file), "k", *units]
            start(child)

        with self.patch.context() as patch:
            patch.setattr(Child, "_start", begin)
            return run_stage("parity", self.scope, self.kept, **options)  # type: ignore[arg-type]

    @property
    def starts(self) -> int:
        return len(self.file.read_text().splitlines())


@pytest.fixture
def stage(tmp_path: Path, scope: Scope, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, scope, monkeypatch)


def test_a_unit_beyond_its_deadline_fails_alone(stage: Stage) -> None:
    found = stage.run("a", "hangs", "b", unit_s=3.0)
    assert found.failed == ["hangs"] and not found.undone
    assert "took longer than" in found.units["hangs"]["error"]
    assert stage.starts == 2


def test_a_unit_that_kills_its_process_fails_alone(stage: Stage) -> None:
    found = stage.run("a", "dies", "b")
    assert found.failed == ["dies"] and "SIGSEGV" in found.units["dies"]["error"]
    assert found.units["b"]["ok"]


def test_a_unit_that_broke_the_device_is_followed_by_a_new_process(stage: Stage) -> None:
    found = stage.run("a", "breaks", "b")
    pids = [found.units[name]["pid"] for name in ("a", "breaks", "b")]
    assert pids[0] == pids[1] != pids[2]
    assert "leaving" not in found.units["breaks"]


def test_units_beyond_the_budget_are_left_open(stage: Stage) -> None:
    """Do not count units that the budget cut short as failed."""
    found = stage.run("a", "hangs", "b", budget_s=6.0)
    assert found.undone == ["hangs", "b"] and not found.failed
    assert stage.kept.read("parity") == found
    text, clean = write_summary(stage.kept)
    assert "2 left: the same command continues" in text and not clean


def test_finished_units_are_not_repeated_and_failed_ones_only_on_request(stage: Stage) -> None:
    first = stage.run("a", "fails")
    assert first.failed == ["fails"]
    second = stage.run("a", "fails")
    assert second.units == first.units
    third = stage.run("a", "fails", retry=True)
    assert not third.failed and third.units["a"] == first.units["a"]
