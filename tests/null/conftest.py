"""Answer probes without a compiler in this tier; tests/flows/test_candidates_probe.py tests the real probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from autosel.native.cuda import Nvcc
    from tests.null.cuda_stand_in import Cuda


@pytest.fixture(autouse=True, scope="module")  # other tiers run in the same process
def _ways_of_pytorch_are_tried_in_this_process() -> Iterator[None]:
    """Assume that torch.compile works on the CPU; make other trial calls here, without a worker; store no answer."""
    from autosel.candidates import probe

    @cache
    def answer(target: str, *arguments: Any) -> str:
        module, _, name = target.partition(":")
        if module == "autosel.candidates.inductor" and arguments[0] == "cpu":
            return ""
        try:
            getattr(import_module(module), name)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        return ""

    def tried(target: str, arguments: Sequence[Any], _: float) -> tuple[str, bool]:
        return answer(target, *(tuple(a) if isinstance(a, list) else a for a in arguments)), False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_tried", tried)
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    from tests.null.cuda_stand_in import Cuda

    made = Cuda()
    made.install(monkeypatch)
    return made


@pytest.fixture
def any_compiler(monkeypatch: pytest.MonkeyPatch) -> Nvcc:
    """Provide an nvcc for every known device, CUTLASS's headers and a C++ compiler, none of which exists."""
    from autosel.native import cuda, cutlass

    architectures = (80, 86, 89, 90, 100, 120)
    nvcc = cuda.Nvcc(path="nvcc", version="release 13.0", home=Path("/"), architectures=architectures)
    monkeypatch.setattr(cuda, "find_nvcc", lambda: nvcc)
    headers = cutlass.Headers(include=Path("/include"), version=(4, 2, 0))
    monkeypatch.setattr(cutlass, "find_headers", lambda: headers)
    for module in ("base", "step"):
        monkeypatch.setattr(f"autosel.candidates.cuda.{module}.find_compiler", lambda: "g++")
    return nvcc
