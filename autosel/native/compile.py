"""Compile a kernel source on first use, and find it again by digest.

The digest covers everything that could change the machine code: the source, every header it includes from kernels/,
flags, and the versions of the compiler and tvm-ffi. An artefact is a folder `<home>/native/<digest>/` with kernel.so
and receipt.json. It is written under another name and renamed, so that it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from autosel import files, resources, settings
from autosel.errors import BuildError, EnvironmentFault
from autosel.native import cuda, cutlass, headers

log = logging.getLogger(__name__)

BASE_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared", "-pthread")
MOST_RECEIPT_BYTES = 16 << 20  # the compiler's output
MOST_LIBRARY_BYTES = 1 << 30
MOST_SOURCE_BYTES = 16 << 20
# nvcc needs a minute for kernels/cutlass/gemm_sm90.cu on an idle core, and over five next to four others on two cores
DEADLINE_S = 900.0
EMPTY_CPP = "control/empty.cpp"  # a kernel that does nothing; control/empty.cu is its counterpart for nvcc
DISK_FULL = ("no space left on device", "disk quota exceeded")  # the next compilation fails too


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A compiled kernel on disk."""

    digest: str
    path: Path
    seconds: float  # duration of the compilation in seconds; 0 if found in the cache
    log: str
    command: tuple[str, ...]
    sources: str  # `sources_digest` of its sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    path: str
    version: str


@cache
def find_compiler() -> Compiler | None:
    """Return the user's compiler, else g++, c++ or clang++; None if none of them runs."""
    for name in filter(None, (settings.compiler(), "g++", "c++", "clang++")):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            found = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0:
            return Compiler(path=path, version=(found.stdout.splitlines() or [name])[0])
    return None


NO_COMPILER = "no C++ compiler found; install one (Debian: apt install g++) or set AUTOSEL_CXX"


def source_digest(source: str, flags: tuple[str, ...]) -> str:
    """Return the artefact's digest, without compiling. Raises BuildError if the compiler or the source is missing."""
    hasher = hashlib.sha256()
    for part in (*_compilers(source), _tvm_ffi(), *flags):
        hasher.update(part.encode() + b"\0")
    hasher.update(sources_digest(source).encode())
    return hasher.hexdigest()


def _compilers(source: str) -> tuple[str, ...]:
    """Return the compiler versions for this source, and the flags of all sources."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(NO_COMPILER)
    if not source.endswith(".cu"):
        return (compiler.version, *BASE_FLAGS)
    nvcc = cuda.find_nvcc()
    if nvcc is None:
        raise BuildError(cuda.NO_NVCC)
    return (nvcc.version, compiler.version, *cuda.BASE_FLAGS, *_headers(source))


def _tvm_ffi() -> str:
    """Return the version of tvm-ffi. Raises BuildError if it is not installed."""
    try:
        return metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError as error:
        raise BuildError("apache-tvm-ffi is not installed", todo="pip install apache-tvm-ffi") from error


def _headers(source: str) -> tuple[str, ...]:
    """Return the version of the headers from outside kernels/ that this source includes."""
    if not source.startswith(f"{cutlass.FOLDER}/"):
        return ()
    found = cutlass.find_headers()
    if found is None:
        raise BuildError(cutlass.NO_HEADERS)
    return (found.text,)


def sources_digest(source: str) -> str:
    """Return the digest of the source and its headers, to detect edits since the compilation. Needs no compiler."""
    hasher = hashlib.sha256()
    for path in find_sources(resources.kernels() / source):
        hasher.update(path.name.encode() + b"\0" + files.read(path, MOST_SOURCE_BYTES) + b"\0")
    return hasher.hexdigest()


def compile_source(source: str, flags: tuple[str, ...] = (), *, deadline_s: float = DEADLINE_S) -> Artefact:
    """Compile `source` (a path in kernels/) into a shared object, or return the cached one.

    Raises BuildError with the compiler's output if it fails or exceeds its timeout; EnvironmentFault if the result
    cannot be stored.
    """
    digest = source_digest(source, flags)
    found = find_artefact(digest)
    if found is not None:
        return found
    try:
        return _make(source, flags, digest, deadline_s)
    except OSError as error:
        todo = f"free some space below {settings.home()}, or set AUTOSEL_HOME to another disk"
        raise EnvironmentFault("a compiled kernel cannot be stored", why=str(error), todo=todo) from error


def _make(source: str, flags: tuple[str, ...], digest: str, deadline_s: float) -> Artefact:
    started, sources = time.monotonic(), sources_digest(source)
    folder = artefacts() / digest
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
        making = Path(temporary) / "made"
        making.mkdir()
        command, said = _compile(source, flags, making / "kernel.so", deadline_s)
        seconds = time.monotonic() - started
        receipt = {
            "source": source,
            "sources": sources,
            "command": command,
            "seconds": seconds,
            "log": said,
            "kernel_sha256": _sha(making),
        }
        (making / "receipt.json").write_text(json.dumps(receipt, indent=1))
        try:
            making.rename(folder)
        except OSError:
            # not a race lost against another process: the existing artefact is damaged
            if find_artefact(digest) is None:
                folder.rename(Path(temporary) / "damaged")
                making.rename(folder)
    return Artefact(
        digest=digest, path=folder / "kernel.so", seconds=seconds, log=said, command=tuple(command), sources=sources
    )


def empty_source(source: str) -> str:
    """Return an empty kernel source for the compiler of `source`."""
    return str(Path(EMPTY_CPP).with_suffix(Path(source).suffix))


def require_compiler(source: str, failed: BuildError) -> None:
    """Compile an empty source after `source` has failed to compile.

    Raises EnvironmentFault if the compiler reported a full disk, or if the empty source fails too with a compiler that
    has worked here before. A compiler that has never worked here is treated as missing.
    """
    said = f"{failed.why} {failed.log}".lower()
    error = failed if any(words in said for words in DISK_FULL) else compiler_trouble(empty_source(source))
    if error is not failed and (error is None or not _has_worked(source)):
        return
    raise EnvironmentFault(
        f"the compiler of {source} does not work any more",
        why=f"{error.what}: {error.why}",
        todo=f"repair it, check it with `{settings.spelling()} doctor`, then run the command again",
    ) from failed


def _has_worked(source: str) -> bool:
    """Return True if this home has an artefact of this source's compiler."""
    found = cuda.find_nvcc() if source.endswith(".cu") else find_compiler()
    stored = [find_artefact(folder.name) for folder in artefacts().glob("*")]
    return found is not None and any(artefact.command[0] == found.path for artefact in stored if artefact is not None)


def compiler_trouble(empty: str) -> BuildError | None:
    """Compile an empty source, bypassing the cache. Return the reason for a failure, or None."""
    try:
        _compilers(empty)
        with tempfile.TemporaryDirectory(prefix="autosel-control-") as folder:
            _compile(empty, (), Path(folder) / "kernel.so", DEADLINE_S)
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError("the compiler has no folder for its result", why=str(error))
    return None


def find_artefact(digest: str) -> Artefact | None:
    """Return the artefact with this digest if it is on disk, complete, and its bytes are unchanged."""
    folder = artefacts() / digest
    try:
        receipt = json.loads(files.read(folder / "receipt.json", MOST_RECEIPT_BYTES))
        if _sha(folder) != receipt["kernel_sha256"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    return Artefact(
        digest=digest,
        path=folder / "kernel.so",
        seconds=0.0,
        log=receipt["log"],
        command=tuple(receipt["command"]),
        sources=receipt["sources"],
    )


def artefacts() -> Path:
    return settings.home() / "native"


def _sha(folder: Path) -> str:
    return hashlib.sha256(files.read(folder / "kernel.so", MOST_LIBRARY_BYTES)).hexdigest()


def find_sources(path: Path) -> list[Path]:
    """Return the source and, recursively, the headers that it includes by a quoted relative name."""
    todo, seen = [path], []
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        if not current.is_file():
            raise BuildError(f"no such kernel source: {current}")
        seen.append(current)
        text = files.read(current, MOST_SOURCE_BYTES).decode(errors="replace")
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE):
            beside = Path(os.path.normpath(current.parent / name))
            if beside.is_file():
                todo.append(beside)
    return sorted(seen)


def _compile(source: str, flags: tuple[str, ...], output: Path, deadline_s: float) -> tuple[list[str], str]:
    """Return the command that made `output`, and the compiler's output. Raises BuildError."""
    path = resources.kernels() / source
    command = _command(path, flags, output)
    said = _with_headers(command, path, source, deadline_s)
    if said is None or not output.is_file():
        said = _run(command, source, deadline_s)
    if not output.is_file():
        raise BuildError(f"{source}: {command[0]} is no compiler", why="it left no library")
    return command, said


def _with_headers(command: list[str], path: Path, source: str, deadline_s: float) -> str | None:
    """Compile with headers that the compiler has read before; None if there are none, or if that fails for any reason:
    the command alone decides."""
    compiler = find_compiler()
    assert compiler is not None
    found = headers.include(compiler.path, compiler.version, path, command)
    if not found:
        return None
    with contextlib.suppress(BuildError):
        return _run([*command, *found], source, deadline_s)
    return None


def compiled_lines(source: str, flags: tuple[str, ...]) -> dict[Path, set[int]]:
    """Return the lines of each file of a C++ source that the preprocessor keeps with these flags. Raises BuildError."""
    path = resources.kernels() / source
    command = [*_command(path, flags, Path("-")), "-E"]
    found: dict[Path, set[int]] = {}
    here, line = path, 1
    for text in _run(command, source, DEADLINE_S).splitlines():
        marker = re.match(r'# (\d+) "([^"]*)"', text)
        if marker is not None:
            line, here = int(marker[1]), Path(os.path.normpath(marker[2]))
            continue
        if text.strip():
            found.setdefault(here, set()).add(line)
        line += 1
    return {file: lines for file, lines in found.items() if file in find_sources(path)}


def _command(source: Path, flags: tuple[str, ...], output: Path) -> list[str]:
    compiler, tvm_ffi = find_compiler(), _tvm_ffi_flags()
    assert compiler is not None
    nvcc = cuda.find_nvcc() if source.suffix == ".cu" else None
    if nvcc is not None:
        headers = cutlass.flags() if source.parent.name == cutlass.FOLDER else ()
        return [*cuda.command(nvcc, compiler.path, source, (*flags, *headers), output), *tvm_ffi]
    return [compiler.path, *BASE_FLAGS, *flags, str(source), "-o", str(output), *tvm_ffi]


def _tvm_ffi_flags() -> list[str]:
    """Return the paths of tvm-ffi's headers and library. Its own finder runs outside its package, because importing the
    package imports torch. Raises BuildError if the package is incomplete."""
    package = importlib.util.find_spec("tvm_ffi")
    places = package.submodule_search_locations if package is not None else None
    if not places:
        raise BuildError("apache-tvm-ffi is not installed", todo="pip install apache-tvm-ffi")
    spec = importlib.util.spec_from_file_location("tvm_ffi.libinfo", Path(places[0]) / "libinfo.py")
    assert spec is not None
    assert spec.loader is not None
    info = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(info)
        folders = [f"-I{info.find_include_path()}", f"-I{info.find_dlpack_include_path()}"]
        return [*folders, f"-L{Path(info.find_libtvm_ffi()).parent}", "-ltvm_ffi", "-ldl"]
    except Exception as error:
        raise BuildError("apache-tvm-ffi is incomplete", why=f"{type(error).__name__}: {error}") from error


def _run(command: list[str], source: str, deadline_s: float) -> str:
    log.info("%s", " ".join(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{source}: the compiler took longer than {deadline_s:.0f} s", why=" ".join(command)
        ) from error
    except OSError as error:
        raise BuildError(f"{source}: the compiler could not be started", why=str(error)) from error
    said = done.stdout + done.stderr
    if done.returncode != 0:
        first = next((line for line in said.splitlines() if "error" in line), said[:200])
        raise BuildError(f"{source} does not compile", why=first, todo=" ".join(command), log=said)
    return said
