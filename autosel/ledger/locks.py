"""Kernel locks: they end with their holder, whatever ends it. A pid is written into the file for the error message, and
never read to decide anything: killed processes linger as zombies that look alive.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from autosel.errors import LedgerError

_POLL_S = 0.002


class InUseError(LedgerError):
    """Another process holds the lock, and held it until our patience ended."""


@contextmanager
def write_lock(database: Path, *, deadline_s: float) -> Iterator[None]:
    """Exclusive right to write to a database file. Raises LedgerError past the deadline."""
    name = "write-" + sha256(str(database).encode()).hexdigest()[:16]
    with _locked(database.parent / "locks" / name, f"the ledger {database}", deadline_s):
        yield


@contextmanager
def publish_lock(home: Path, deadline_s: float) -> Iterator[None]:
    """Exclusive right to replace the serving snapshot."""
    with _locked(home / "locks" / "publish", "the serving snapshot", deadline_s):
        yield


@contextmanager
def faults_lock(home: Path) -> Iterator[None]:
    """Exclusive right to take in the journal of faults."""
    with _locked(home / "locks" / "faults", "the journal of faults", 10.0):
        yield


@contextmanager
def daemon_lock(home: Path) -> Iterator[None]:
    """Exclusive right to be this home's daemon; at once, or InUseError that names the one there is."""
    with _locked(home / "locks" / "daemon", "this home", 0.0):
        yield


@contextmanager
def device_lock(home: Path, hw_id: str) -> Iterator[None]:
    """Exclusive right to measure on a device; at once, or LedgerError that names the holder.

    Worker processes inherit the descriptor if they are given it: the device then stays taken while one still runs.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,128}", hw_id):
        raise AssertionError(f"not a device id: {hw_id!r}")
    with _locked(home / "locks" / f"device-{hw_id}", "this device", 0.0):
        yield


@contextmanager
def _locked(path: Path, what: str, deadline_s: float) -> Iterator[None]:
    descriptor = _open(path)
    try:
        if not _take(descriptor, deadline_s):
            raise InUseError(
                f"{what} is in use by another process",
                why=f"held by {_holder(descriptor)}",
                todo="let it finish, or end it; its lock ends with it",
            )
        with suppress(OSError):  # a full disk costs only the name in the message
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, whoami().encode(), 0)
        yield
    finally:
        os.close(descriptor)  # releases the lock, unless a child inherited it


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LedgerError(f"cannot take the lock {path}", why=str(error), todo="make its folder writable") from error


def _take(descriptor: int, deadline_s: float) -> bool:
    until = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)


def whoami() -> str:
    """This process, for messages."""
    try:
        command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "python"
    return f"pid {os.getpid()} ({command[:200]})"


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 400, 0).decode(errors="replace")
    return re.sub(r"[^\x20-\x7e]", "?", text) or "an unknown process"
