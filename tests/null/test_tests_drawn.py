"""Check that the options that a failure prints repeat a run's selection."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import drawn

ROOT = Path(__file__).resolve().parents[2]
DRAWS = """\
import pathlib
from hypothesis import given, strategies as st
from tests import drawn

examples = []

@given(st.integers())
def test_examples(number):
    examples.append(number)

def test_fails():
    pathlib.Path("drew").write_text(f"{drawn.turn()} {drawn.seed} {hash(tuple(examples))}")
    assert False
"""


def failed(folder: Path, *options: str, ci: str = "") -> tuple[str, str]:
    """Run failing tests; return the values that they drew, and the options that pytest printed."""
    (folder / "test_draws.py").write_text(DRAWS)
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTEST_ADDOPTS")} | {"PYTHONPATH": str(ROOT)}
    environment |= {"CI": ci} if ci else {}
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "--rootdir", ".", *options, "test_draws.py"]
    command = [sys.executable, "-P", "-m", "pytest", *words]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (printed,) = re.findall(r"the same cases and inputs again: (.*)", ran.stdout)
    return (folder / "drew").read_text(), printed


def test_a_failure_prints_the_options_that_repeat_it(tmp_path: Path) -> None:
    first, printed = failed(tmp_path)
    other, _ = failed(tmp_path)
    assert other.split()[1:] != first.split()[1:], "by hand each run draws others"
    assert failed(tmp_path, *printed.split()) == (first, printed)


def test_in_ci_the_examples_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    first, other = (failed(tmp_path, "--seed", seed, ci="true")[0] for seed in ("1", "2"))
    assert first.split()[2] == other.split()[2] and first.split()[1] != other.split()[1]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12, 18, 38, 84, 108, 180])
def test_within_as_many_days_as_choices_each_choice_is_selected(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(day: int) -> int:
        monkeypatch.setattr(drawn, "day", datetime.date.fromordinal(day).isoformat())
        return drawn.todays(range(count))

    assert {choice(739_941 + day) for day in range(count)} == set(range(count))
