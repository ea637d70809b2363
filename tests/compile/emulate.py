"""Compile a CUDA source for this CPU under the SIMT harness (simt.h), and call it as a worker calls the real one.

Builds for tests are kept in the home under digests of their inputs.
"""

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
from autosel.native import cutlass
from autosel.native.compile import Compiler, _tvm_ffi_flags, find_compiler, sources_digest
from autosel.native.cuda import Nvcc, find_nvcc

HERE = Path(__file__).parent
BEFORE_CUTLASS = HERE / "cutlass_first.h"
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


@contextmanager
def keep(file: Path) -> Iterator[Path]:
    """Yield a path to write, then rename it: a reader in another process sees all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        yield made
        made.replace(file)


def kept(name: str, ending: str, *parts: str | bytes) -> Path:
    """Return the path `<home>/<name>-<digest of the parts>.<ending>`, e.g. with the name emulated/gemv."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return settings.home() / f"{name}-{hasher.hexdigest()[:24]}.{ending}"


def tools() -> tuple[Compiler, Nvcc]:
    """Return the compilers; tests that need them skip if there is none (conftest.py)."""
    compiler, nvcc = find_compiler(), find_nvcc()
    assert compiler is not None
    assert nvcc is not None
    return compiler, nvcc


def output_of(*command: str) -> str:
    """Return what a compiler or its tool writes to stdout and stderr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
    return done.stdout + done.stderr


def built(file: Path, *command: str) -> Path:
    """Return the file; if it is missing, run the command, which writes to the path after it."""
    if not file.is_file():
        with keep(file) as made:
            output_of(*command, str(made))
    return file


def one_dtype(dtype: str) -> str:
    """Return the macro of a build for one dtype: a third of the work for the compiler."""
    return f"AUTOSEL_{dtype.upper()}"


def includes() -> list[str]:
    """Return flags for tvm-ffi's and CUDA's headers; CUDA's are system headers, without warnings."""
    return [*_tvm_ffi_flags(), "-isystem", str(tools()[1].home / "include")]


def emulated(source: str, entry: str, *macros: str) -> Callable[..., None]:
    """Return the entry of kernels/cuda/<source>.cu on emulated threads, or of cutlass/<source> or a path; macros as
    NAME=VALUE.

    With `pytest --ptx 9.0`, the PTX of kernels/cuda/ for that compute capability runs instead (ptx_machine.py).
    """
    if as_ptx and not source.startswith("cutlass/"):
        from tests.compile import ptx_machine

        return ptx_machine.built(f"cuda/{source}", *macros, cc=as_ptx).entry(entry)
    return entry_of(library(source, *macros), entry)


@cache
def entry_of(build: Path, entry: str) -> Callable[..., None]:
    import tvm_ffi

    function: Callable[..., Any] = getattr(tvm_ffi.load_module(str(build)), entry)
    return function


@contextmanager
def overlapped(source: str, *macros: str) -> Iterator[None]:
    """Run this build's launches inside the block at its end; each dependent launch starts before the previous ones end.

    Raises RuntimeError with the fault. Tensors must exist until then.
    """
    if as_ptx and not source.startswith("cutlass/"):  # in sequence: the interpreted device runs one launch at a time
        yield
        return
    loaded = ctypes.CDLL(str(library(source, *macros)))
    loaded.simt_release.restype = ctypes.c_char_p
    loaded.simt_hold()
    said = b""
    try:
        yield
    finally:
        said = loaded.simt_release()
    if said:
        raise RuntimeError(said.decode())


@cache
def harness() -> Path:
    """Return the harness for all builds of this process, read once by the compiler: CUDA's headers take it a second."""
    folder = Path(tempfile.mkdtemp(prefix="autosel-simt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "simt.h"
    header.write_text(f'#include "{HERE / "simt.h"}"\n')
    alone = [flag for flag in (*FLAGS, *includes()) if flag != "-shared" and not flag.startswith(("-L", "-l"))]
    command = [tools()[0].path, *alone, "-DAUTOSEL_DEVICE=kDLCPU", "-x", "c++-header", str(header)]
    output_of(*command, "-o", f"{header}.gch")
    return header


@cache
def library(source: str, *macros: str) -> Path:
    """Return the compiled library of a source as `emulated` names it."""
    compiler, nvcc = tools()
    flags = [*FLAGS, "-DAUTOSEL_DEVICE=kDLCPU", *(f"-D{m}" for m in macros)]
    file = resources.kernels() / (f"{source}.cu" if "/" in source else f"cuda/{source}.cu")
    headers = cutlass.find_headers() if file.parent.name == "cutlass" else None
    parts = [(HERE / "simt.h").read_bytes(), sources_digest(str(file)), compiler.version, *flags]
    parts += [BEFORE_CUTLASS.read_bytes(), headers.text] if headers else []
    made = kept(f"emulated/{file.stem}", "so", *parts)
    if made.is_file():
        return made
    if headers:
        flags += ["-isystem", str(headers.include), "-isystem", str(nvcc.home / "include" / "cccl")]
        flags += ["-include", str(BEFORE_CUTLASS), "-include", str(HERE / "simt.h")]
    else:
        flags += ["-include", str(harness())]
    return built(made, compiler.path, *flags, "-x", "c++", str(file), *includes(), "-o")
