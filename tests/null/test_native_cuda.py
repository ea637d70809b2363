"""Test which nvcc is used, and its flags for a toolkit in two environments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from autosel import settings
from autosel.native import cuda

# The used part of nvcc: its version, its targets, and its path.
NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
--list-gpu-arch) echo compute_80; echo compute_90 ;;
-dryrun) echo "#$ TOP=$(dirname "$0")/.." >&2 ;;
esac
"""


@pytest.fixture
def pips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Provide only pip's toolkit: nvcc in this environment, the runtime's headers in the one whose torch is reused."""
    ours, theirs = (tmp_path / name / "nvidia" / "cu13" for name in ("ours", "theirs"))
    (ours / "bin").mkdir(parents=True)
    (ours / "bin" / "nvcc").write_text(NVCC)
    (ours / "bin" / "nvcc").chmod(0o755)
    for part in ("include/cccl", "lib"):
        (theirs / part).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "theirs"))
    monkeypatch.syspath_prepend(str(tmp_path / "ours"))
    monkeypatch.setattr(settings, "cuda_home", lambda: None)
    monkeypatch.setattr(cuda, "_places", lambda: iter([str(ours / "bin" / "nvcc")]))
    cuda.find_nvcc.cache_clear()
    yield ours, theirs
    cuda.find_nvcc.cache_clear()


def test_the_rest_of_pips_toolkit_is_found_in_the_environment_that_is_reused(pips: tuple[Path, Path]) -> None:
    ours, theirs = pips
    nvcc = cuda.find_nvcc()
    assert nvcc is not None
    assert nvcc.home == ours
    assert theirs in nvcc.beside
    assert ours not in nvcc.beside
    words = cuda.command(nvcc, "g++", Path("kernel.cu"), (), Path("kernel.so"))
    told = list(pairwise(words))
    assert ("-isystem", str(theirs / "include")) in told
    assert ("-isystem", str(theirs / "include" / "cccl")) in told
    assert f"-L{theirs / 'lib'}" in words


def test_a_toolkit_not_from_pip_has_no_other_folder(pips: tuple[Path, Path], tmp_path: Path) -> None:
    system = tmp_path / "cuda-13" / "bin"
    system.mkdir(parents=True)
    (system / "nvcc").write_text(NVCC)
    (system / "nvcc").chmod(0o755)
    cuda.find_nvcc.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_places", lambda: iter([str(system / "nvcc")]))
        nvcc = cuda.find_nvcc()
    assert nvcc is not None
    assert nvcc.beside == ()
    assert cuda.headers(nvcc) == []
