"""Build a kernel whose sources have one wrong line."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from autosel import resources
from autosel.native.compile import compile_source

NAMESPACE = "namespace autosel {\n"


def header_of(line: str, headers: Sequence[str]) -> str:
    """Return the first of these headers that has the line."""
    for name in headers:
        if line in (resources.kernels() / "cpu" / name).read_text():
            return name
    raise AssertionError(f"no line of {', '.join(headers)} has {line!r}")


def build(
    source: str, header: str, right: str, wrong: str, flags: Sequence[str], folder: Path, *, also: str = ""
) -> str:
    """Return the digest of `source` (as cpu/gemv.cpp), compiled with `wrong` for `right` in a header of its folder.

    `also`: functions that wrong lines call, at the start of the header's namespace.
    """
    shutil.copytree(resources.kernels() / "cpu", folder / "cpu")
    for file in resources.kernels().glob("*.h"):
        shutil.copy(file, folder)
    faulty = folder / "cpu" / header
    text = faulty.read_text()
    assert right in text
    faulty.write_text(text.replace(right, wrong).replace(NAMESPACE, NAMESPACE + also, 1))
    return compile_source(str(folder / source), tuple(flags)).digest
