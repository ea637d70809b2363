"""Compile the probes like a fingerprint does: by NVRTC, in memory, one file without other headers. (The other tests use
nvcc, which brings its headers.)"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator

import pytest

from autosel import resources
from tests.compile.triton_kernels import TARGETS
from tests.engines import ENGINES, missing

NAME = b"probes.cu"
FLAGS = (b"-std=c++17", b"-ftz=true")  # our options, and cupy's


@pytest.fixture(scope="module")
def nvrtc() -> Iterator[ctypes.CDLL]:
    """Return the library. Its compiler removes the stack limit of this process."""
    if missing("nvrtc"):
        pytest.skip(missing("nvrtc"))
    (library,) = (ENGINES / "nvrtc").rglob("libnvrtc.so.*")
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    before = resource.getrlimit(resource.RLIMIT_STACK)
    yield ctypes.CDLL(str(library))
    resource.setrlimit(resource.RLIMIT_STACK, before)


@pytest.mark.parametrize("cc", sorted(TARGETS), ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_nvrtc_compiles_the_probes(nvrtc: ctypes.CDLL, cc: tuple[int, int]) -> None:
    source = (resources.kernels() / "cuda" / "probes.cu").read_bytes()
    code = compiled(nvrtc, source, cc)
    assert code.startswith(b"\x7fELF")
    assert b"probe_gate" in code


def test_errors_of_nvrtc_are_reported(nvrtc: ctypes.CDLL) -> None:
    with pytest.raises(AssertionError, match="could not open source file"):
        compiled(nvrtc, b"#include <nowhere.h>\n", (9, 0))


def compiled(nvrtc: ctypes.CDLL, source: bytes, cc: tuple[int, int]) -> bytes:
    """Return a cubin; fail with the compiler's log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, NAME, 0, None, None) == 0
    options = (*FLAGS, f"-arch=sm_{cc[0]}{cc[1]}".encode())
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    what = "ProgramLog" if failed else "CUBIN"
    assert nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert nvrtc[f"nvrtcGet{what}"](program, text) == 0
    assert not failed, text.value.decode()
    return text.raw
