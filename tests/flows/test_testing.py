"""Run the conformance suite as its users do, with a separate pytest in an empty folder, on a correct kernel, a wrong
one and one that crashes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosel import settings
from autosel.testing.plugin import ConformanceRun

MODULE = '''
"""Three ways to run rmsnorm."""

import ctypes

import torch

import autosel


@autosel.candidate("rmsnorm", name="fused")
def fused(x, weight, eps, offset, out=None):
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    y = x32.mul(rstd).mul_(weight.float() + offset)
    return y.to(x.dtype) if out is None else out.copy_(y)


@autosel.candidate("rmsnorm", name="careless", dtypes=("bf16",))
def careless(x, weight, eps, offset):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)


@autosel.candidate("rmsnorm", name="falls")
def falls(x, weight, eps, offset):
    if x.shape[1] == 7:
        ctypes.string_at(0)
    return fused(x, weight, eps, offset)
'''
SUITE = "pytest -p autosel.testing.plugin --pyargs autosel.testing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernels")
    (made / "threekernels.py").write_text(MODULE)
    return made


def suite(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the suite as a kernel author would."""
    words = shlex.split(command)
    assert words[0] == "pytest"
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words[1:]]
    environment = {**settings.passed_to_workers(), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(own, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    commands = {
        "fused": f"{SUITE} --candidate threekernels:fused --op rmsnorm",
        "careless": f"{SUITE} --candidate threekernels:careless --op rmsnorm -x",
        "falls": f"{SUITE} --candidate threekernels:falls --op rmsnorm --dtype fp32 --case 'random M3 d7'",
        "nobody": f"{SUITE} --candidate threekernels:nobody --op rmsnorm",
    }
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(commands, pool.map(lambda c: suite(folder, c), commands.values()), strict=True))


def test_a_right_kernel_passes_every_item(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = runs["fused"]
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) > 35  # 31 hostile inputs, six habits, full size, containment
    assert "skipped" not in done.stdout


def test_a_wrong_kernel_gets_element_value_bound_case_and_a_command_to_reproduce(
    runs: dict[str, subprocess.CompletedProcess[str]], folder: Path
) -> None:
    done = runs["careless"]
    assert done.returncode == 1, done.stdout + done.stderr
    failure = re.search(r'user:careless failed parity \(check "\w+", case "([^"]+)"\)', done.stdout)
    assert failure is not None, done.stdout
    assert "this case covers:" in done.stdout
    element = re.search(r"element \[.*\]: got .*, reference .*, allowed ±.*", done.stdout)
    again = re.search(r"reproduce: (pytest .*)", done.stdout)
    assert element is not None
    assert again is not None
    repeated = suite(folder, again[1])
    assert repeated.returncode == 1
    assert element[0] in repeated.stdout  # the same inputs, so the same element and value
    assert "1 failed" in repeated.stdout


def test_a_kernel_that_crashes_fails_its_item_and_not_the_run(
    runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = runs["falls"]
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'check "crash", case "random M3 d7"' in done.stdout
    assert "SIGSEGV" in done.stdout
    assert "threekernels.py" in done.stdout  # the Python frame it died under


def test_a_missing_candidate_is_a_usage_error(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    assert runs["nobody"].returncode == pytest.ExitCode.USAGE_ERROR
    assert "nobody" in runs["nobody"].stderr + runs["nobody"].stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [({"candidate": None}, "--candidate"), ({"op": None}, "--op"), ({"device": "tpu"}, "tpu")],
)
def test_a_wrong_option_is_reported_before_collection(options: dict[str, str | None], said: str) -> None:
    usual = {"candidate": "torch:rmsnorm", "op": "rmsnorm", "dtype": [], "model": "llama-8b", "batch": 1, "seq": 8192}
    given = {**usual, "device": "cpu", "case": "", "inputs": "", "deadline": 1.0, **options}
    run = ConformanceRun(SimpleNamespace(getoption=given.__getitem__))  # type: ignore[arg-type]
    with pytest.raises(pytest.UsageError, match=said):
        run.pytest_sessionstart()
