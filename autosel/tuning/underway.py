"""Show other processes of this home which commands run: a file for each below `run/commands`.

The kernel's lock on a file ends with its process, however that ends; a file without a lock is removed by its reader.
The daemon's pages and `status` show them.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autosel.values import from_json, parse_json, to_json

FOLDER = ("run", "commands")
MOST_BYTES = 4096  # of a file, padded, so that one write replaces a longer one
MOST_FILES = 64
MOST_TEXT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCommand:
    """Describe a command and how far it is; `left_s` is -1 while nobody can tell."""

    command: str  # `autosel tune --model llama-8b`
    pid: int
    started_at: str  # UTC, ISO 8601
    stage: str = ""
    detail: str = ""
    done: int = 0
    total: int = 0
    decided: int = 0
    left_s: float = -1.0


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Underway:
    """The file of this process's command. Anything that fails leaves the command unseen, and does not stop it."""

    def __init__(self, home: Path) -> None:
        self._path = home.joinpath(*FOLDER, f"{os.getpid()}.json")
        self._descriptor = -1
        self._last = b""

    def show(self, command: RunningCommand) -> None:
        """Write the file, if anything changed."""
        text = json.dumps(_short(command)).encode()
        if text == self._last or len(text) > MOST_BYTES:
            return
        self._last = text
        with suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = _create(self._path, text)
            else:
                os.pwrite(self._descriptor, text.ljust(MOST_BYTES), 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _short(command: RunningCommand) -> dict[str, object]:
    found: dict[str, object] = to_json(command)
    return {name: value[:MOST_TEXT] if isinstance(value, str) else value for name, value in found.items()}


def _create(path: Path, text: bytes) -> int:
    """Write a file and lock it before it has its name: a reader removes files without a lock. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    making = path.with_name(f".{path.name}")
    descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, text.ljust(MOST_BYTES), 0)
        making.rename(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def commands(home: Path) -> list[RunningCommand]:
    """Return the commands that run in this home now, longest first. Removes the files of those that were killed."""
    found = []
    with suppress(OSError):
        for path in sorted(home.joinpath(*FOLDER).glob("[0-9]*.json"))[:MOST_FILES]:
            with suppress(OSError, ValueError):
                text = _text_of_running(path)
                found += [from_json(RunningCommand, parse_json(text, what=path.name))] if text else []
    return sorted(found, key=lambda command: command.started_at)


def _text_of_running(path: Path) -> bytes:
    """Return a file's content if its process still runs, else b"". Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return b""
    except BlockingIOError:
        return os.pread(descriptor, MOST_BYTES, 0).strip()
    finally:
        os.close(descriptor)
