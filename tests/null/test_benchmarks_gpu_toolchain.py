"""Test that a run on a GPU is not clean if our kernels cannot be built or checked, and names what to install."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosel.candidates.triton.base import NO_TRITON
from autosel.fingerprint import known
from autosel.native import cuda, cutlass
from autosel.native.compile import NO_COMPILER
from autosel.native.cuda import NO_NVCC, Nvcc
from autosel.native.cutlass import NO_HEADERS, Headers
from autosel.values import Fingerprint
from benchmarks.gpu import parity, sanitizer
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.entrants import entries
from benchmarks.gpu.scope import Scope, scope_of
from benchmarks.gpu.stages import Found

ROOT = Path(__file__).resolve().parents[2]
H200, RTX = known.load("h200"), known.load("rtx-5070-ti")
NVCC = Nvcc(path="nvcc", version="release 12.4", home=Path("/"), architectures=(80, 86, 89, 90))


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(cuda, "find_nvcc", lambda: NVCC)
    monkeypatch.setattr(cutlass, "find_headers", lambda: Headers(include=Path("/include"), version=(4, 2, 0)))
    monkeypatch.setattr("autosel.candidates.cuda.base.find_compiler", lambda: "g++")
    monkeypatch.setattr("autosel.candidates.triton.base.find_spec", lambda name: name)
    return monkeypatch


def scope(*words: str) -> Scope:
    return scope_of(parsed(["--device", "cuda", "--dtype", "bf16", *words]))


def refusals(fp: Fingerprint, *ops: str) -> dict[str, Found]:
    """Return the outcome in parity of each candidate that supports no workload of the scope."""
    asked = scope(*(word for op in ops for word in ("--op", op)))
    units = {e.candidate.name: e.name for e in entries(asked, fp) if e.refused}
    return {name: parity.run(unit, asked, fp) for name, unit in units.items()}


def test_with_every_tool_installed_a_refusal_is_not_a_failure(all_there: pytest.MonkeyPatch) -> None:
    found = refusals(H200, "gemv")
    assert found["cpp:gemv"]["reason"] == "a CPU kernel; the device is a GPU"
    assert all(one["ok"] and one["outcome"] == "refused" for one in found.values())


CUTLASS = {"cutlass:gemm_sm80", "cutlass:gemm_sm90"}
COMPILED = {"cuda:gemv", "cuda:gemv_fp8", *CUTLASS}


@pytest.mark.parametrize(
    ("lost", "reason", "unbuilt"),
    [
        ("native.cuda.find_nvcc", NO_NVCC, COMPILED),
        ("native.cutlass.find_headers", NO_HEADERS, CUTLASS),
        ("candidates.cuda.base.find_compiler", NO_COMPILER, COMPILED),
        ("candidates.triton.base.find_spec", NO_TRITON, {"triton:gemv", "triton:gemv_fp8", "triton:gemm"}),
    ],
)
def test_a_kernel_of_ours_that_cannot_be_built_has_failed_and_names_what_to_install(
    all_there: pytest.MonkeyPatch, lost: str, reason: str, unbuilt: set[str]
) -> None:
    """Test also a kernel whose first shape is refused first: CUTLASS's tiles are refused at one row."""
    all_there.setattr(f"autosel.{lost}", lambda *_: None)
    found = refusals(H200, "gemv")
    failed = {name: one["reason"] for name, one in found.items() if not one["ok"]}
    assert failed == dict.fromkeys(unbuilt, reason)
    assert all(found[name]["outcome"] == "cannot be built" for name in failed)
    assert found["cpp:gemv"]["ok"]


# --- the sanitizer ----------------------------------------------------------------------------------------------------


def test_the_environment_of_a_gpu_has_a_sanitizer_that_starts_programs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [need for need in extras["cuda13"] if need.startswith("nvidia-cuda-sanitizer-api")]
    assert len(asked) == 1
    assert asked[0].partition(",")[0] in sanitizer.NO_SANITIZER


@pytest.mark.parametrize("lost", ["nvcc", "headers", "triton"])
def test_tests_of_gpu_sources_fail_in_ci_if_their_compiler_is_missing(lost: str, all_there: pytest.MonkeyPatch) -> None:
    """Fail them in CI; elsewhere they skip with the reason."""
    from tests.compile import conftest

    marked: list[str] = []
    path = conftest.HERE / "test_emulated_rows.py"
    items: list[Any] = [SimpleNamespace(path=path, add_marker=lambda mark: marked.append(mark.name))]
    all_there.setattr(conftest, "find_nvcc", lambda: None if lost == "nvcc" else NVCC)
    all_there.setattr(conftest, "find_compiler", lambda: "g++")
    all_there.setattr(conftest, "find_spec", lambda name: None if lost == "triton" else name)
    if lost == "headers":
        all_there.setattr(cutlass, "find_headers", lambda: None)
    all_there.delenv("CI", raising=False)
    conftest.pytest_collection_modifyitems(items)
    assert marked == (["compile", "skip"] if lost == "nvcc" else ["compile"])
    all_there.setenv("CI", "true")
    with pytest.raises(pytest.UsageError, match="in CI no test of tests/compile skips"):
        conftest.pytest_collection_modifyitems(items)
    items[0].path = ROOT / "tests" / "null" / "test_cli.py"
    conftest.pytest_collection_modifyitems(items)
