"""Test headers that the compiler reads once: bytes are the same with and without, no compilation depends on them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel import resources, settings
from autosel.errors import BuildError
from autosel.native import compile as native
from autosel.native import headers
from autosel.native.compile import compile_source, find_compiler

FOUND = find_compiler()
pytestmark = pytest.mark.skipif(FOUND is None or "clang" in FOUND.version, reason="needs g++")
KERNELS = sorted(path for path in (resources.kernels() / "cpu").glob("*.cpp"))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path))
    settings.read.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    settings.read.cache_clear()


def build(number: int, source: str = "cpu/kv_append.cpp") -> bytes:
    """Compile once more, under another macro that changes nothing."""
    return compile_source(source, ("-DAUTOSEL_FP32", f"-DAUTOSEL_MARK={number}")).path.read_bytes()


def read_ahead(home: Path) -> list[Path]:
    return list((home / "headers").glob("*/system.h.gch"))


def test_the_third_kernel_with_the_same_flags_reads_the_headers_for_all_and_all_have_the_same_bytes(
    empty: Path,
) -> None:
    made = [build(number) for number in range(2)]
    assert read_ahead(empty) == []
    made += [build(2)]
    (kept,) = read_ahead(empty)
    before = kept.stat().st_mtime_ns
    made += [build(3)]
    assert kept.stat().st_mtime_ns == before and len(set(made)) == 1


def test_other_flags_have_headers_of_their_own(empty: Path) -> None:
    for number in range(3):
        build(number)
        compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", "-mavx2", "-mfma", "-mf16c", f"-DAUTOSEL_MARK={number}"))
    assert len(read_ahead(empty)) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_damaged_headers_change_no_result(damage: str, empty: Path) -> None:
    made = [build(number) for number in range(3)]
    (kept,) = read_ahead(empty)
    data = kept.read_bytes()
    kept.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "text": b"#error no"}[damage])
    assert build(3) == made[0]


def test_a_compiler_that_cannot_read_ahead_still_compiles(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\ncase "$*" in *c++-header*) exit 1 ;; esac\nexec g++ "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("AUTOSEL_CXX", str(script))
    settings.read.cache_clear()
    find_compiler.cache_clear()
    try:
        assert len({build(number) for number in range(4)}) == 1
        assert read_ahead(empty) == []
    finally:
        monkeypatch.undo()
        settings.read.cache_clear()
        find_compiler.cache_clear()


def test_an_error_is_that_of_the_kernels_own_command(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        build(number)
    with pytest.raises(BuildError) as caught:
        compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", "-DTensorView=("))
    assert "-include" not in caught.value.todo


def test_a_receipt_has_the_command_without_the_headers(empty: Path) -> None:
    found = [compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", f"-DAUTOSEL_MARK={n}")) for n in range(4)]
    assert all("-include" not in made.command for made in found)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_kernel_begins_with_the_headers(path: Path) -> None:
    """Check that no header from outside is read before, whatever the kernel includes first."""
    assert FOUND is not None
    command = [FOUND.path, *native.BASE_FLAGS, "-DAUTOSEL_FP32", str(path), *native._tvm_ffi_flags(), "-E", "-H"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    read: list[str] = []  # the files that are open
    for dots, name in re.findall(r"^(\.+) (.+)$", told, flags=re.MULTILINE):
        read[len(dots) - 1 :] = [name]
        if not Path(name).resolve().is_relative_to(resources.kernels()):
            break
    assert Path(read[-2]).name == headers.NAME, read
