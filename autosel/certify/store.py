"""The certificate file: one line per certificate, appended under a lock, each with the checksum of the previous line.

An append writes a new file and renames it over the old one: if the run dies, the disk is full or power fails, the file
is the old or the new one, never half a line.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from autosel import files
from autosel.certify.certificate import MOST_BYTES, Certificate, decode, encode
from autosel.errors import AutoselError, UsageError

MOST_FILE_BYTES = 1 << 30


class BadCertificate(AutoselError):
    """A certificate file that cannot be trusted; names line and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """End of the chain: the number of lines, and the checksum of the last ("" if there is none)."""

    lines: int
    checksum: str


def append(path: Path, make: Callable[[Head], Certificate]) -> Certificate:
    """Append what `make` builds for the head of the chain. It is on disk on return.

    Raises BadCertificate if the last line is not a complete certificate, UsageError if the path is not a file.
    """
    path = Path(os.path.realpath(path))
    with _locked(path):
        found = head(path)
        made = make(found)
        line = encode(made)
        assert made.sequence == found.lines + 1 and made.previous == found.checksum
        if len(line) > MOST_BYTES:
            raise AutoselError(f"this certificate would take {len(line)} bytes", why=f"at most {MOST_BYTES} are read")
        _replace(path, line)
    return made


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number (from 1) and bytes of each line, without newline. Raises BadCertificate for a partial line."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(MOST_BYTES + 2):
            number += 1
            if not line.endswith(b"\n"):
                why = f"it is longer than {MOST_BYTES} bytes" if len(line) > MOST_BYTES else "its newline is missing"
                raise BadCertificate(f"{path}:{number} is not a whole line", why=why)
            yield number, line[:-1]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = files.opened(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error), todo="check the path") from error
    with file:
        if os.fstat(file.fileno()).st_size > MOST_FILE_BYTES:
            raise BadCertificate(f"{path} is too large", why=f"more than {MOST_FILE_BYTES >> 20} MiB")
        yield file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder against other appending processes. The lock is the kernel's: it ends with its holder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"cannot write {path}", why=error.strerror or str(error), todo="check the path") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def head(path: Path) -> Head:
    """Return the end of the file's chain. Raises BadCertificate for a file that cannot be appended to."""
    if not path.exists():
        return Head(lines=0, checksum="")
    count, last = 0, b""
    for number, line in lines(path):
        count, last = number, line
    if not count:
        return Head(lines=0, checksum="")
    try:
        made = decode(last)
    except ValueError as error:
        raise BadCertificate(
            f"{path}:{count} is not a certificate", why=str(error), todo="name another file; nothing was written"
        ) from error
    if made.sequence != count:
        raise BadCertificate(
            f"{path}:{count} is numbered as line {made.sequence}",
            why="lines were removed or added",
            todo="name another file; nothing was written",
        )
    return Head(lines=count, checksum=made.checksum)


def _replace(path: Path, line: bytes) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with suppress(FileNotFoundError):
            making.unlink()  # from a killed process with the same number
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            if path.exists():
                with files.opened(path) as old:
                    shutil.copyfileobj(old, file)
            file.write(line + b"\n")
            file.flush()
            os.fsync(descriptor)
        making.replace(path)
        files.sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            making.unlink()
        raise AutoselError(
            f"cannot write {path}", why=error.strerror or str(error), todo="free some space, or name another file"
        ) from error
