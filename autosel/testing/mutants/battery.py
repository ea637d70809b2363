"""The state of the checks behind a score: a digest of their sources, which is stored with each row."""

from __future__ import annotations

import hashlib
from pathlib import Path

from autosel import resources

PACKAGE = Path(__file__).parents[2]
FOLDERS = (PACKAGE / "ops", PACKAGE / "parity", PACKAGE / "testing" / "mutants")


def digest() -> str:
    """Return eight hexadecimal digits that change with every source of an op, a check, a mutant or a C++ kernel."""
    files = [file for folder in FOLDERS for file in sorted(folder.rglob("*.py"))]
    files += sorted((resources.kernels() / "cpu").iterdir())
    found = hashlib.blake2b(digest_size=4)
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()
