"""Describe the software that determines speed and correctness of a kernel here; with hw_id it forms env_id.

The operating system's kernel release is not included. A kernel update changes the cost of a page fault or a futex,
which `drifted` detects by the rates, but no machine code; unattended security updates would otherwise make a whole
fleet measure again. Its huge-page policy is included, because that changes the bandwidth of every tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from autosel import resources
from autosel.native.compile import find_compiler
from autosel.version import __version__


def environment(root: Path = Path("/")) -> dict[str, Any]:
    """Return versions, read from package metadata without importing anything."""
    compiler = find_compiler()
    return {
        "autosel": __version__,
        "kernel_pack": pack_digest("cpu"),
        "torch": version_of("torch"),
        "tvm_ffi": version_of("apache-tvm-ffi"),
        "compiler": compiler.version if compiler else None,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "libc": _libc(),
        "huge_pages": _huge_pages(root),
    }


def pack_digest(kind: str) -> str:
    """Return the sha256 over names and bytes of every source in kernels/<kind>/."""
    hasher = hashlib.sha256()
    folder = resources.kernels() / kind
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        hasher.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError, AttributeError):
        return None  # musl, or not Linux


def _huge_pages(root: Path) -> str | None:
    """Return the transparent-huge-page policy in force: always, madvise or never."""
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else None
