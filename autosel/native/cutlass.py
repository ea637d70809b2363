"""Find CUTLASS's headers and their version, and return nvcc's flags for them.

The package nvidia-cutlass contains them inside its module cutlass_library; nothing is imported from it.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LEAST = (4, 2)  # the sources were written for the collectives of this version
FOLDER = "cutlass"  # sources below kernels/cutlass/ get these headers
NO_HEADERS = "no CUTLASS headers found; install them with pip: nvidia-cutlass>=4.2 (--no-deps: only headers are needed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    include: Path
    version: tuple[int, int, int]

    @property
    def text(self) -> str:
        return "CUTLASS " + ".".join(map(str, self.version))


@cache
def find_headers() -> Headers | None:
    """Return the headers of the package nvidia-cutlass, or None if they are not installed."""
    package = importlib.util.find_spec("cutlass_library")
    for folder in package.submodule_search_locations or () if package else ():
        include = Path(folder) / "source" / "include"
        version = _version(include / "cutlass" / "version.h")
        if version is not None:
            return Headers(include=include, version=version)
    return None


def _version(file: Path) -> tuple[int, int, int] | None:
    if not file.is_file():
        return None
    told = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", file.read_text()))
    return int(told["MAJOR"]), int(told["MINOR"]), int(told["PATCH"])


def why_not() -> str:
    """Return the reason why kernels/cutlass/ cannot be compiled here, or ""."""
    found = find_headers()
    if found is None:
        return NO_HEADERS
    if found.version < LEAST:
        why = f"needs CUTLASS {LEAST[0]}.{LEAST[1]}; the headers found are of {found.text}"
        return f"{why}; install nvidia-cutlass>=4.2"
    return ""


def flags() -> tuple[str, ...]:
    """Return flags for nvcc; none if there are no headers.

    The headers count as system headers, to silence their warnings. Host code only launches, so it is barely optimised:
    g++ otherwise takes as long for its templates as nvcc for the kernel.
    """
    found = find_headers()
    return ("--expt-relaxed-constexpr", "-Xcompiler", "-O1", "-isystem", str(found.include)) if found else ()
