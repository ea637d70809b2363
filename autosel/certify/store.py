"""The certificate file: one line a certificate, appended under a lock, each line naming the checksum of the one before.

An append writes the whole file anew beside the old one and puts it in its place: a run that dies, a full disk or a lost
power line leaves the old file or the new one, never half a line.
"""

from __future__ import annotations

import fcntl
import os
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
_COPY_BYTES = 1 << 20


class BadCertificate(AutoselError):
    """A certificate, or a file of them, that is not to be believed: says which line and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where the chain ends: the number of lines, and the checksum of the last (empty: there is none)."""

    lines: int
    checksum: str


def append(path: Path, make: Callable[[Head], Certificate]) -> Certificate:
    """Add what `make` builds for the head of the chain, for good: it is on disk on return.

    Raises BadCertificate for a file whose last line is not a whole certificate, UsageError for what is no file.
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
    """(number from 1, bytes without the newline) of each line. Raises BadCertificate for half a line or a huge one."""
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


# --- append ----------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among those who append in the folder. The lock is the kernel's: it ends with its holder."""
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
    """Where the file's chain ends. Raises BadCertificate for a file that nothing can be appended to."""
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
            f"{path}:{count} is no certificate", why=str(error), todo="name another file; nothing was written"
        ) from error
    if made.sequence != count:
        raise BadCertificate(
            f"{path}:{count} says it is line {made.sequence}",
            why="lines were taken out or added",
            todo="name another file; nothing was written",
        )
    return Head(lines=count, checksum=made.checksum)


def _replace(path: Path, line: bytes) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with suppress(FileNotFoundError):
            making.unlink()  # left by a killed process that had our number
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            _copy(path, file)
            file.write(line + b"\n")
            file.flush()
            os.fsync(descriptor)
        making.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            making.unlink()
        raise AutoselError(
            f"cannot write {path}", why=error.strerror or str(error), todo="free some space, or name another file"
        ) from error


def _copy(path: Path, target: BinaryIO) -> None:
    if not path.exists():
        return
    with files.opened(path) as source:
        while part := source.read(_COPY_BYTES):
            target.write(part)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
