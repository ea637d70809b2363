"""Compute the key of stored results. A run keeps results whose key is unchanged and measures all others again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from autosel import resources
from autosel.devices.stack import version_of
from autosel.values import Fingerprint, digest
from benchmarks.gpu.engines import ENGINES
from benchmarks.gpu.scope import Scope

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".hpp", ".h")
# Tools that compile or measure kernels, in addition to wrapped libraries and engines.
TOOLS = ("torch", "triton", "apache-tvm-ffi", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cutlass")


def held_for(scope: Scope, fp: Fingerprint) -> str:
    """Return the key of a stage's record: scope, device, driver, sources, nvcc and every library that can be timed."""
    from autosel.native.cuda import find_nvcc

    nvcc = find_nvcc()
    found = {
        "scope": scope.plain,
        "env_id": fp.env_id,
        "sources": sources_digest(),
        "nvcc": nvcc.version if nvcc else "",
        "libraries": {name: version_of(name) or "" for name in distributions()},
    }
    return digest(found)


def sources_digest(checkout: Path = ROOT, kernels: Path | None = None) -> str:
    """Return the digest of kernels, package and benchmarks.

    All stages share one digest, because the sources that a stage reaches cannot be determined reliably.
    """
    hasher = sha256()
    for folder in (kernels or resources.kernels(), checkout / "autosel", checkout / "benchmarks"):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
            hasher.update(path.relative_to(folder.parent).as_posix().encode() + b"\0")
            hasher.update(sha256(path.read_bytes()).digest())
    return hasher.hexdigest()


def distributions() -> list[str]:
    """Return the pip names of wrapped libraries, engines and tools."""
    from autosel.candidates.libraries.base import LibraryKernel
    from autosel.candidates.registry import own_candidates

    libraries = [c.library for c in own_candidates() if isinstance(c, LibraryKernel)]
    wrapped = {name for library in libraries for name in (library.distribution, library.renamed) if name}
    return sorted({*wrapped, *ENGINES.values(), *TOOLS})
