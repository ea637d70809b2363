"""Packages that only parts of autosel need, by extra of pyproject.toml: what is missing, and how to install it."""

from __future__ import annotations

import sys
from pathlib import Path

from autosel import resources, settings
from autosel.errors import UsageError


def missing(extra: str, what: str, error: ImportError | None = None) -> UsageError:
    """Return the error for a package of an extra that cannot be imported. `what` needs it, such as "a report"."""
    name = error.name.partition(".")[0] if error is not None and error.name else ""
    return UsageError(
        f"{what} needs {f'the package {name}, of ' if name else ''}the extra {extra}",
        why=str(error) if error is not None else "",
        todo=f"install it:  {command(extra)}",
    )


def command(extra: str) -> str:
    """Return the command that installs an extra for this Python: ./run's in the environment of a checkout."""
    root = resources.root()
    if (root / "run").is_file() and Path(sys.prefix).resolve() == (root / ".venv").resolve():
        started = settings.spelling()
        return f"{started if Path(started).name == 'run' else root / 'run'} setup {extra}"
    return f"pip install 'autosel-kernels[{extra}]'"


def gpu_command() -> str:
    """Return the command that installs what measures a GPU and compiles for it."""
    return f"{command('cuda13')}  (cuda12 under a driver for CUDA 12)"
