"""Read files whose content others may have chosen: only regular files, and only up to a limit.

A device has no end, a pipe waits for its writer, and a link may lead to either. Every reader of a file of a home or of
a user uses this module. Files in /proc and /sys, and files that ship with autosel, are exempt.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from autosel.errors import BadConfig

PART_BYTES = 1 << 20  # read at a time: a buffer of the limit's size would be reserved for every small file

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class NotReadable(OSError):
    """A path that can be opened but must not be read; `strerror` gives the reason."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(None, why, str(path))
        self.strerror = why

    def __str__(self) -> str:
        return str(self.strerror)


def opened(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, through a link if `follow`. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise NotReadable(path, f"it is {KINDS.get(kind, 'no file')}, not a regular file")
    return os.fdopen(descriptor, "rb")


def is_folder(path: Path) -> bool:
    """Return True for a folder. Return False, not OSError, for a name that is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are stored. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, most_bytes: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most `most_bytes`. Raises OSError."""
    with opened(path, follow=follow) as file:
        return _whole(file, path, most_bytes)


def read_named(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file that the user named. Raises BadConfig."""
    try:
        return read(path, most_bytes)
    except OSError as error:
        raise BadConfig(f"cannot read {path}", why=error.strerror or str(error), todo="check the path") from error


def read_own(path: Path, most_bytes: int, *, follow: bool = True) -> bytes:
    """Return the content of a file that only this user or root can have written, because it decides which code runs.

    Raises FileNotFoundError or NotADirectoryError if it does not exist, BadConfig for one that cannot be trusted.
    """
    try:
        with opened(path, follow=follow) as file:
            others = writers(os.fstat(file.fileno()))
            content = b"" if others else _whole(file, path, most_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise BadConfig(f"{path} cannot be read", why=error.strerror or str(error)) from error
    if others:
        raise BadConfig(
            f"{path} may have been written by others: not used",
            why=f"{others}; it decides which code runs here",
            todo=f"if you trust it: chown {os.getuid()} and chmod 600 {path}",
        )
    return content


def writers(info: os.stat_result) -> str:
    """Return owner and mode of a file that users other than this one and root can write, else ""."""
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid in (os.getuid(), 0) and not mode & 0o022:
        return ""
    return f"owner {info.st_uid}, mode {mode:04o}"


def _whole(file: BinaryIO, path: Path, most_bytes: int) -> bytes:
    size, content = os.fstat(file.fileno()).st_size, bytearray()
    while size <= most_bytes and (part := file.read(PART_BYTES)):
        content += part
        size = len(content)
    if size > most_bytes:
        raise NotReadable(path, f"{size} bytes are more than the limit of {_size(most_bytes)} for such a file")
    return bytes(content)


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
