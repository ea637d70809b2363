"""Test headers that the compiler reads once: bytes are the same with and without, no compilation depends on them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autosel import resources, settings
from autosel.errors import BuildError
from autosel.native import headers
from autosel.native.compile import compile_source, find_compiler

FOUND = find_compiler()
pytestmark = pytest.mark.skipif(FOUND is None or "clang" in FOUND.version, reason="needs g++")
KERNELS = sorted(path for path in (resources.kernels() / "cpu").glob("*.cpp"))


@contextmanager
def at_home(home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSEL_HOME", str(home))
        settings.read.cache_clear()
        yield
    settings.read.cache_clear()


def build(number: int, source: str = "cpu/kv_append.cpp") -> bytes:
    """Compile once more, under another macro that changes nothing."""
    return compile_source(source, ("-DAUTOSEL_FP32", f"-DAUTOSEL_MARK={number}")).path.read_bytes()


def read_ahead(home: Path) -> list[Path]:
    return list((home / "headers").glob("*/system.h.gch"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return a home in which three kernels have been compiled, and their bytes."""
    home = tmp_path_factory.mktemp("three")
    with at_home(home):
        made = [build(number) for number in range(2)]
        assert read_ahead(home) == []
        made.append(build(2))
    assert len(set(made)) == 1
    return home, made[0]


@pytest.fixture
def there(three: tuple[Path, bytes]) -> Iterator[tuple[Path, bytes]]:
    with at_home(three[0]):
        yield three


def test_the_third_kernel_with_the_same_flags_reads_the_headers_for_all_and_all_have_the_same_bytes(
    there: tuple[Path, bytes],
) -> None:
    (kept,) = read_ahead(there[0])
    before = kept.stat().st_mtime_ns
    assert build(3) == there[1] and kept.stat().st_mtime_ns == before


def test_the_compiler_accepts_what_it_has_read_whatever_macros_a_kernel_has(there: tuple[Path, bytes]) -> None:
    (kept,) = read_ahead(there[0])
    macros = ("-DAUTOSEL_BF16", "-DAUTOSEL_FORMATS=Symmetric<4, 128, bf16>")
    command = compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", "-DAUTOSEL_MARK=21")).command
    words = [*command[:-1], *macros, "-include", str(kept.with_suffix("")), "-H", "-fsyntax-only", command[-1]]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stderr
    assert told.startswith(f"! {kept}\n")  # "x": read, and not used


def test_other_flags_have_headers_of_their_own(home: Path) -> None:
    for number in range(3):
        build(number)
        compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", "-mavx2", "-mfma", "-mf16c", f"-DAUTOSEL_MARK={number}"))
    assert len(read_ahead(home)) == 2


def test_damaged_headers_change_no_result(there: tuple[Path, bytes]) -> None:
    (kept,) = read_ahead(there[0])
    data = kept.read_bytes()
    for number, damage in enumerate((b"", data[: len(data) // 2], b"#error no")):
        kept.write_bytes(damage)
        assert build(10 + number) == there[1]
    kept.write_bytes(data)


def test_a_compiler_that_cannot_read_ahead_still_compiles(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    tried = tmp_path / "tried"
    script.write_text(f'#!/bin/sh\ncase "$*" in *c++-header*) echo >>{tried}; exit 1 ;; esac\nexec g++ "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("AUTOSEL_CXX", str(script))
    settings.read.cache_clear()
    find_compiler.cache_clear()
    try:
        assert len({build(number) for number in range(5)}) == 1
        assert read_ahead(home) == [] and tried.read_text() == "\n", "once, not in each compilation"
    finally:
        find_compiler.cache_clear()


def test_an_error_and_a_receipt_have_the_kernels_own_command(there: tuple[Path, bytes]) -> None:
    with pytest.raises(BuildError) as caught:
        compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", "-DTensorView=("))
    assert "-include" not in caught.value.todo
    assert "-include" not in compile_source("cpu/kv_append.cpp", ("-DAUTOSEL_FP32", "-DAUTOSEL_MARK=20")).command


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_kernel_begins_with_the_headers(path: Path) -> None:
    """Check that no header from outside is read earlier."""
    found = first_from_outside(path)
    assert found is not None and found.name == headers.NAME


def first_from_outside(file: Path) -> Path | None:
    """Return the file with the first `#include <...>`, in the order of the preprocessor."""
    for quoted, outside in re.findall(r'^\s*#\s*include\s+(?:"([^"]+)"|(<))', file.read_text(), flags=re.MULTILINE):
        found = file if outside else first_from_outside((file.parent / quoted).resolve())
        if found is not None:
            return found
    return None
