"""Test the key of a stage's results: everything that could change the results changes the key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autosel.fingerprint import known
from autosel.native import cuda
from autosel.native.cuda import Nvcc
from benchmarks.gpu import held
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.scope import scope_of

FP = known.load("h200")
SCOPE = scope_of(parsed(["--device", "cuda"]))
NVCC = Nvcc(path="nvcc", version="release 13.0, V13.0.48", home=Path("/"), architectures=(90,))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("kernels/cutlass/gemm.cu", "kernels/ffi.h", "autosel/knobs/gemv.py", "benchmarks/gpu/parity.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["kernels/cutlass/gemm.cu", "kernels/ffi.h", "autosel/knobs/gemv.py", "benchmarks/gpu/parity.py"]
)
def test_results_of_other_sources_are_not_reused(checkout: Path, name: str) -> None:
    before = held.sources_digest(checkout, checkout / "kernels")
    assert held.sources_digest(checkout, checkout / "kernels") == before
    (checkout / name).write_text("two")
    assert held.sources_digest(checkout, checkout / "kernels") != before


def test_the_key_follows_sources_compiler_libraries_driver_and_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(held.distributions(), "1.0")
    monkeypatch.setattr(cuda, "find_nvcc", lambda: NVCC)
    monkeypatch.setattr(held, "version_of", lambda name: versions[name])
    monkeypatch.setattr(held, "sources_digest", lambda: "these")
    keys = [held.held_for(SCOPE, FP)]
    assert held.held_for(replace(SCOPE, out="/elsewhere"), FP) == keys[0]
    keys.append(held.held_for(replace(SCOPE, seq=SCOPE.seq + 1), FP))
    keys.append(held.held_for(SCOPE, replace(FP, environment={**FP.environment, "driver": "580.1"})))
    versions["flashinfer-python"] = "2.0"
    keys.append(held.held_for(SCOPE, FP))
    monkeypatch.setattr(cuda, "find_nvcc", lambda: replace(NVCC, version="release 13.1, V13.1.80"))
    keys.append(held.held_for(SCOPE, FP))
    monkeypatch.setattr(held, "sources_digest", lambda: "others")
    keys.append(held.held_for(SCOPE, FP))
    assert len(set(keys)) == len(keys)
