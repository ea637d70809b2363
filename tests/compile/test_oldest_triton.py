"""Test the oldest Triton that the extras admit, which comes with the oldest torch: users pin their own release, and an
older one may refuse a kernel that the newest compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

from tests.compile.triton_kernels import TARGETS
from tests.drawn import todays
from tests.engines import ROOT, missing, paths, version

SCRIPT = Path(__file__).with_name("compiled_by.py")


def test_the_oldest_triton_is_the_lower_bound_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cuda12", "cuda13-system", "cross"):
        (lowest,) = [w for w in extras[extra] if w.startswith("triton")]
        assert version("triton").startswith(lowest.removeprefix("triton>="))


@pytest.mark.skipif(missing("triton") != "", reason=missing("triton"))
def test_every_triton_kernel_compiles_with_the_oldest_triton_too() -> None:
    """Compile for one target per day."""
    major, minor = todays(sorted(TARGETS))
    command = [sys.executable, "-P", str(SCRIPT), f"{major}.{minor}"]
    environment = {**os.environ, "PYTHONPATH": paths("triton")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == [version("triton")]  # its version, and no faults
