"""What tests of CUDA sources need, without which they skip, and in CI fail: nvcc, a C++ compiler; and how much of the
matrix of targets to go through.

    @pytest.mark.in_turns(choices)                                        what gives a list of them
    @pytest.mark.in_turns({"gemv": choices_of_gemv, ...}, label=named)    a list a group

runs a test that has an argument `choice` once (once a group), with the choice whose turn it is on the day of --on-day;
with --every-target once with each choice, under the name it is given, so that they run side by side and fail by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autosel.native import cutlass
from autosel.native.compile import find_compiler
from autosel.native.cuda import find_nvcc
from tests.compile import emulate
from tests.compile.emulate import todays

HERE = Path(__file__).parent
CUDA = ("test_emulated", "test_machine_code", "test_ptx")  # tests of kernels/cuda/


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target", action="store_true", help="tests/compile: all kernels for all targets, not today's share"
    )
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("in_turns"):
        (asked,) = mark.args
        groups = asked if isinstance(asked, Mapping) else {"today": asked}
        if metafunc.config.getoption("--every-target", default=False):
            label = mark.kwargs.get("label", str)
            found = [pytest.param(lambda one=one: one, id=label(one)) for g in groups.values() for one in g()]
        else:
            found = [pytest.param(partial(_todays, g, n), id=name) for n, (name, g) in enumerate(groups.items())]
        metafunc.parametrize("choice", found, indirect=True)


def _todays(choices: Callable[[], Sequence[Any]], turn: int) -> Any:
    """Only where the test runs: to list all choices takes time."""
    return todays(choices(), turn)


@pytest.fixture
def choice(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """References are small: a team's barriers would take longer than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
