"""Provide nvcc and a C++ compiler for tests of CUDA sources. Without them tests skip, or fail in CI."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from autosel.native import cutlass
from autosel.native.compile import find_compiler
from autosel.native.cuda import find_nvcc
from tests.compile import emulate

HERE = Path(__file__).parent
CUDA = ("test_emulated", "test_machine_code", "test_ptx")  # tests of kernels/cuda/


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ptx",
        metavar="CC",
        help="tests/compile/test_emulated_*: run the kernels' PTX for this compute capability: 9.0",
    )


def pytest_configure(config: pytest.Config) -> None:
    asked = config.getoption("--ptx", default=None)
    if asked:
        if not re.fullmatch(r"\d+\.\d", asked):
            raise pytest.UsageError(f"--ptx {asked}: a compute capability is meant, e.g. 9.0")
        major, minor = map(int, asked.split("."))
        emulate.as_ptx = major, minor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "no nvcc" if find_nvcc() is None else "no C++ compiler" if find_compiler() is None else ""
    also = cutlass.why_not() or ("" if find_spec("triton") else "no Triton")
    if os.environ.get("CI") and (missing or also) and any(item.path.parent == HERE for item in items):
        raise pytest.UsageError(f"{missing or also}: in CI no test of tests/compile skips for it; ./run setup cross")
    for item in items:
        if item.path.parent == HERE and item.path.stem.startswith(CUDA):
            item.add_marker(pytest.mark.compile)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread(one_torch_thread: None) -> None:
    """Run references on one thread: they are small, and a pool's barriers would take longer."""
