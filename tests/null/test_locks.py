"""Test locks/: they contain the requirements of pyproject.toml, and CI installs nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import engines

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / "locks").glob("py*.txt"))
LINE = re.compile(r"([a-z0-9-]+)==(\S+)(?: --hash=sha256:[0-9a-f]{64})+(?:  # ([a-z0-9, -]+))?")
GPU_EXTRAS = {"cpu": set(), "cu126": {"cuda12"}, "cu128": {"cuda12"}, "cu130": {"cuda13", "cuda13-system"}}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("autosel_run_for_locks", str(ROOT / "run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def lines(lock: Path) -> dict[str, tuple[Version, set[str]]]:
    """Return {name: (version, extras that need it)}."""
    found = {}
    for row in lock.read_text().splitlines():
        if row.startswith("#"):
            continue
        parts = LINE.fullmatch(row)
        assert parts is not None, row
        assert parts[1] not in found, f"{parts[1]} twice"
        found[parts[1]] = (Version(parts[2]), set((parts[3] or "").split(", ")))
    return found


def test_there_is_a_lock_for_each_python_and_each_build_of_torch() -> None:
    names = {f"py{python}-{build}" for python in (311, 312, 313) for build in GPU_EXTRAS}
    assert {lock.stem for lock in LOCKS} == names


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_names_its_python_and_build_and_if_it_was_tested(script: ModuleType, lock: Path) -> None:
    python, build = re.fullmatch(r"py3(\d+)-(\w+)", lock.stem).groups()
    version = script.TORCH_FOR_CUDA_12_8 if build == "cu128" else script.TORCH
    first, *others = lock.read_text().splitlines()
    assert first.startswith(f"# Python 3.{python}, torch {version}") and build.removeprefix("cu") in first
    assert ("Tested" in first) == (lock.stem == "py311-cpu") != ("Not tried" in first)
    assert any(row.startswith(f"# torch=={version}: ") for row in others)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_each_extra_finds_all_its_requirements_in_a_lock_at_releases_that_satisfy_them(
    script: ModuleType, lock: Path
) -> None:
    found, build = lines(lock), lock.stem.partition("-")[2]
    left_out = set().union(*GPU_EXTRAS.values()) - GPU_EXTRAS[build]
    asked = {extra: script.requirements([extra]) for extra in {*PROJECT["optional-dependencies"]} - left_out}
    asked |= {"all": script.requirements([]), "build": ["pip", *script.build_requirements()]}
    for extra, needs in asked.items():
        for need in map(Requirement, needs):
            if need.name != "torch":
                version, users = found[canonicalize_name(need.name)]
                assert need.specifier.contains(version, prereleases=True), (extra, need, version)
                assert {extra, "all"} & users, f"{extra} would be installed without {need.name}"
    version, users = found[canonicalize_name(Requirement(script.CUTLASS).name)]
    assert users == set(script.WITH_CUTLASS) & set(asked) and version >= Version("4.2")


@pytest.mark.parametrize("file", sorted((ROOT / "locks").glob("*.txt")), ids=lambda file: file.stem)
def test_no_file_names_an_index_and_every_release_has_its_hash(file: Path) -> None:
    assert lines(file)
    assert "://" not in file.read_text() and "--index" not in file.read_text()


def test_a_lock_for_a_cpu_has_nothing_that_only_a_gpu_needs() -> None:
    for lock in LOCKS:
        if lock.stem.endswith("-cpu"):
            of_torch = {name for name, (_, users) in lines(lock).items() if "all" in users}
            assert not {name for name in of_torch if name.startswith(("nvidia-cu", "cuda-", "cupy", "triton"))}


def test_the_engines_of_the_tests_are_locked() -> None:
    asked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        calls = re.findall(r"(?:engines\.)?(?:missing|paths)\(((?:\"[\w-]+\"(?:, )?)+)\)", path.read_text())
        asked |= {name for call in calls for name in re.findall(r"[\w-]+", call)} - {"engine"}
    assert {"vllm", "sglang", "triton", "flashinfer-bench"} <= asked
    assert asked - {"engine"} <= set(engines.WHEELS) | {"nvcc", "gpu", "chromium"}


def test_ci_installs_only_what_is_locked_and_draws_the_same_each_day() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert "pip install" not in text and "--no-lock" not in text
    runs = [row for row in text.splitlines() if "./run test -" in row and not row.startswith("#")]
    assert runs and all('"${same[@]}"' in row for row in runs)
    (same,) = re.findall(r"^same=\((.*?)\)", text, flags=re.MULTILINE)
    assert re.fullmatch(r"--on-day \d{4}-\d\d-\d\d --seed \d+", same)
