"""Lock with kernel locks, which end with their holder, however it ends. The file contains the holder's pid for error
messages. No decision depends on that pid, because killed processes linger as zombies that look alive."""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from autosel.errors import LedgerError

_POLL_S = 0.002
NAME_BYTES = 1024  # bytes of the holder's name, padded, so that one write replaces a longer name


class InUseError(LedgerError):
    """Raised if another process holds the lock until the timeout."""


def write_lock(database: Path, *, deadline_s: float) -> AbstractContextManager[None]:
    """Lock writing to a database file. Raises LedgerError after the deadline."""
    return _locked(_write_lock(database), f"the ledger {database}", deadline_s)


class KeptLock:
    """Lock like `write_lock`, for a process that writes often: its file stays open. A forked child must not write
    through it, because the kernel treats it as its parent."""

    def __init__(self, database: Path) -> None:
        self._path, self._what = _write_lock(database), f"the ledger {database}"
        self._descriptor = -1
        self._one = threading.Lock()  # the kernel treats threads of one process as one holder

    @contextmanager
    def held(self, *, deadline_s: float) -> Iterator[None]:
        """Hold the lock. Raises LedgerError after the deadline."""
        with self._one:
            if self._descriptor < 0 or not _still_there(self._path, self._descriptor):
                self.close()
                self._descriptor = _open(self._path)
            _hold(self._descriptor, self._what, deadline_s)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _still_there(path: Path, descriptor: int) -> bool:
    """Return True if other openers of the path would get this same file."""
    try:
        found = path.stat()
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _write_lock(database: Path) -> Path:
    return database.parent / "locks" / ("write-" + sha256(str(database).encode()).hexdigest()[:16])


def publish_lock(home: Path, deadline_s: float) -> AbstractContextManager[None]:
    """Lock replacing the serving snapshot."""
    return _locked(home / "locks" / "publish", "the serving snapshot", deadline_s)


def faults_lock(home: Path) -> AbstractContextManager[None]:
    """Lock storing the journal of faults."""
    return _locked(home / "locks" / "faults", "the journal of faults", 10.0)


def daemon_lock(home: Path) -> AbstractContextManager[None]:
    """Lock being this home's daemon; at once, or InUseError that names the present one."""
    return _locked(home / "locks" / "daemon", "this home", 0.0)


def device_lock(home: Path, hw_id: str, unit: str = "") -> AbstractContextManager[None]:
    """Lock measuring on a device; at once, or LedgerError that names the holder. `unit` distinguishes equal devices of
    a machine.

    Worker processes inherit the descriptor if they are given it: the device then stays locked while one still runs.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,128}", hw_id):
        raise AssertionError(f"not a device id: {hw_id!r}")
    name = f"device-{hw_id}" + (f"-{sha256(unit.encode()).hexdigest()[:16]}" if unit else "")
    return _locked(home / "locks" / name, "this device", 0.0)


@contextmanager
def _locked(path: Path, what: str, deadline_s: float) -> Iterator[None]:
    descriptor = _open(path)
    try:
        _hold(descriptor, what, deadline_s)
        yield
    finally:
        os.close(descriptor)  # releases the lock, unless a child inherited it


def _hold(descriptor: int, what: str, deadline_s: float) -> None:
    """Take the lock, and write this process's name into its file."""
    if not _take(descriptor, deadline_s):
        raise InUseError(
            f"{what} is in use by another process",
            why=f"held by {_holder(descriptor)}",
            todo="let it finish, or end it; its lock ends with it",
        )
    with suppress(OSError):  # a full disk only loses the name in the message
        os.pwrite(descriptor, whoami().encode().ljust(NAME_BYTES), 0)


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
    """Describe this process, for messages."""
    return f"pid {os.getpid()} ({_command(os.getpid())[:200]})"


@lru_cache(maxsize=1)
def _command(_: int) -> str:
    try:
        return Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "python"


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, NAME_BYTES, 0).decode(errors="replace").strip()
    return re.sub(r"[^\x20-\x7e]", "?", text) or "an unknown process"
