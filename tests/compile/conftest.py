"""What tests of CUDA sources need: nvcc and a C++ compiler; and how much of the matrix of targets to go through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel.native.compile import find_compiler
from autosel.native.cuda import find_nvcc

HERE = Path(__file__).parent
CUDA = ("test_emulated", "test_machine_code")  # tests of kernels/cuda/


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target", action="store_true", help="tests/compile: all kernels for all targets, not today's share"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "no nvcc" if find_nvcc() is None else "no C++ compiler" if find_compiler() is None else ""
    for item in items:
        if item.path.parent == HERE and item.path.stem.startswith(CUDA):
            item.add_marker(pytest.mark.compile)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def every_target(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--every-target"))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """References are small: a team's barriers would take longer than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
