"""Compile a CUDA source for this CPU under the SIMT harness (simt.h), and call it as a worker calls the real one."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from autosel import resources, settings
from autosel.native.compile import _tvm_ffi_flags, find_compiler, sources_digest
from autosel.native.cuda import find_nvcc

HERE = Path(__file__).parent
as_ptx: tuple[int, int] | None = None  # a compute capability; set by conftest.py
FLAGS = (
    "-std=c++20",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
    "-Wno-class-memaccess",
    "-fPIC",
    "-shared",
)


def keep(file: Path, text: str) -> None:
    """Write atomically: a reader in another process sees all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        made.write_text(text)
        made.replace(file)


def one_dtype(dtype: str) -> str:
    """Return the macro of a build for one dtype: a third of the work for the compiler."""
    return f"AUTOSEL_{dtype.upper()}"


def includes() -> list[str]:
    """Return flags for tvm-ffi's and CUDA's headers; CUDA's are system headers, without warnings."""
    nvcc = find_nvcc()
    assert nvcc is not None
    return [*_tvm_ffi_flags(), "-isystem", str(nvcc.home / "include")]


def emulated(source: str, entry: str, *macros: str) -> Callable[..., None]:
    """Return the entry of kernels/cuda/<source>.cu (or of a path) on emulated threads; macros as NAME=VALUE.

    With `pytest --ptx 9.0`, its PTX for that compute capability runs instead (ptx_machine.py).
    """
    if as_ptx:
        from tests.compile.ptx_machine import built

        return built(f"cuda/{source}", *macros, cc=as_ptx).entry(entry)
    return _emulated(source, entry, *macros)


@cache
def _emulated(source: str, entry: str, *macros: str) -> Callable[..., None]:
    import tvm_ffi

    function: Callable[..., Any] = getattr(tvm_ffi.load_module(str(_built(source, macros))), entry)
    return function


@contextmanager
def overlapped(source: str, *macros: str) -> Iterator[None]:
    """Run this build's launches inside the block at its end; each dependent launch starts before the previous ones end.

    Raises RuntimeError with the fault. Tensors must exist until then.
    """
    if as_ptx:  # in sequence: the interpreted device runs one launch at a time
        yield
        return
    with held_back(_built(source, macros)):
        yield


@contextmanager
def held_back(build: Path) -> Iterator[None]:
    library = ctypes.CDLL(str(build))  # uses the library that is already loaded
    library.simt_release.restype = ctypes.c_char_p
    library.simt_hold()
    said = b""
    try:
        yield
    finally:
        said = library.simt_release()
    if said:
        raise RuntimeError(said.decode())


@cache
def harness() -> Path:
    """Return the harness for all builds of this process, read once by the compiler: CUDA's headers take it a second."""
    compiler = find_compiler()
    assert compiler is not None
    folder = Path(tempfile.mkdtemp(prefix="autosel-simt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "simt.h"
    header.write_text(f'#include "{HERE / "simt.h"}"\n')
    alone = [flag for flag in (*FLAGS, *includes()) if flag != "-shared" and not flag.startswith(("-L", "-l"))]
    command = [compiler.path, *alone, "-DAUTOSEL_DEVICE=kDLCPU", "-x", "c++-header", str(header)]
    done = subprocess.run([*command, "-o", f"{header}.gch"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[:4000]
    return header


def _built(source: str, macros: tuple[str, ...]) -> Path:
    """Return the compiled library, cached by the digest of its inputs."""
    compiler = find_compiler()
    assert compiler is not None
    flags = [*FLAGS, "-DAUTOSEL_DEVICE=kDLCPU", *(f"-D{m}" for m in macros)]
    file = resources.kernels() / "cuda" / f"{source}.cu"
    hasher = hashlib.sha256((HERE / "simt.h").read_bytes())
    for part in (sources_digest(str(file)), compiler.version, *flags):
        hasher.update(part.encode() + b"\0")
    made = settings.home() / "emulated" / f"{file.stem}-{hasher.hexdigest()[:24]}.so"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        output = Path(folder) / made.name
        command = [compiler.path, *flags, "-x", "c++", "-include", str(harness()), str(file), "-o", str(output)]
        done = subprocess.run([*command, *includes()], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[:4000]
        output.rename(made)
    return made
