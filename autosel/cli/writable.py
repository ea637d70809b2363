"""Check that files and folders can be written, before minutes of measuring, by creating and removing a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autosel.errors import UsageError


def refuse_file(path: Path) -> None:
    """Raise UsageError if the file cannot be written. Its folder must exist."""
    with _refused(path):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"cannot write {path}", why=f"folder {path.parent} does not exist")
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise UsageError(f"cannot write {path}", why=f"it is {what}", todo="name a file")
        _try(path.absolute())


def refuse_folder(path: Path) -> None:
    """Raise UsageError if the folder cannot be created or written. Remove what the check creates."""
    with _refused(path):
        if path.exists() and not path.is_dir():
            raise UsageError(f"cannot write into {path}", why="it is a file", todo="name a folder")
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        _try(path.absolute() / "report")
        with suppress(OSError):  # another process has created a file there
            for folder in missing:
                folder.rmdir()


def _try(path: Path) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.unlink(missing_ok=True)  # from a killed process with the same number
    os.close(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    making.unlink()


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}", why=error.strerror or str(error), todo="check the path") from error
