"""Folders of files outside the package: kernels/, fingerprints/, db/.

In a wheel they are below `autosel/_data`; in a checkout (editable install, or run in place) next to the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    data = _PACKAGE / "_data"
    return data if data.is_dir() else _PACKAGE.parent


def kernels() -> Path:
    return root() / "kernels"


def fingerprints() -> Path:
    return root() / "fingerprints"


def migrations() -> Path:
    return root() / "db"
