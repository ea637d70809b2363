"""Client of this home's daemon over its Unix socket, with the standard library only: serving processes import this.

    ask = Client()                      # the socket below AUTOSEL_HOME
    ask.get("/v1/serving")              # JSON, or the AutoselError that the daemon answered with

Without a daemon it raises `Unreachable` at once, and the caller continues alone.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

from autosel import errors, settings
from autosel.errors import AutoselError

FOLDER, SOCKET = "run", "daemon.sock"
MOST_REPLY_BYTES = 256 << 20
MOST_PATH = 100  # bytes of a Unix socket's name that every system accepts (Linux: 107)


class Unreachable(AutoselError):
    """No daemon answers. If `sent`, the request may still have been executed."""

    def __init__(self, what: str, *, why: str = "", todo: str = "", sent: bool = False) -> None:
        super().__init__(what, why=why, todo=todo)
        self.sent = sent


class Refused(AutoselError):
    """The daemon refused the request. `status` is HTTP's."""

    def __init__(self, what: str, *, why: str = "", todo: str = "", status: int = 0) -> None:
        super().__init__(what, why=why, todo=todo)
        self.status = status


def socket_path(home: Path | None = None) -> Path:
    return (home or settings.home()) / FOLDER / SOCKET


class Client:
    """One request at a time, over a persistent connection. Not for several threads."""

    def __init__(self, path: Path | None = None, *, timeout_s: float = 10.0) -> None:
        self.path = path or socket_path()
        self.timeout_s = timeout_s
        self._line: _Line | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    @property
    def there(self) -> bool:
        return self.path.exists()

    def get(self, target: str) -> Any:
        return self._ask("GET", target, None)

    def post(self, target: str, body: Any) -> Any:
        return self._ask("POST", target, json.dumps(body, separators=(",", ":"), allow_nan=False).encode())

    def delete(self, target: str) -> Any:
        return self._ask("DELETE", target, None)

    def _ask(self, method: str, target: str, body: bytes | None) -> Any:
        fresh = self._line is None
        try:
            status, data = self._exchange(method, target, body)
        except Unreachable as error:
            if fresh or error.sent:
                raise
            status, data = self._exchange(method, target, body)  # the daemon had closed an idle connection
        return _understood(status, data)

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request and return status and body. Raises Unreachable."""
        sent = False
        try:
            if self._line is None:
                self._line = _Line(self.path, self.timeout_s)
                self._line.connect()
            kind = {"Content-Type": "application/json"} if body is not None else {}
            self._line.request(method, target, body=body, headers=kind)
            sent = True
            reply = self._line.getresponse()
            data = reply.read(MOST_REPLY_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # If the connection was closed before the first byte of an answer, the request was not executed.
            taken = sent and not isinstance(error, http.client.RemoteDisconnected | BrokenPipeError)
            raise Unreachable(
                f"no daemon answers at {self.path}", why=str(error) or type(error).__name__, sent=taken
            ) from error
        if reply.will_close:
            self.close()
        return reply.status, data


def _understood(status: int, data: bytes) -> Any:
    try:
        found = json.loads(data) if data else None
    except ValueError as error:
        raise Refused("the daemon's answer is not JSON", why=str(error), status=status) from error
    if status < 400:
        return found
    told = found.get("error", {}) if isinstance(found, dict) else {}
    what, why, todo = (str(told.get(n) or "") for n in ("what", "why", "todo"))
    kind = getattr(errors, str(told.get("kind")), None)
    if kind in _PLAIN:
        raise kind(what, why=why, todo=todo)
    raise Refused(what or f"the daemon answered {status}", why=why, todo=todo, status=status)


# Errors without further data, which are raised again as the same type.
_PLAIN = (errors.LedgerError, errors.ParityError, errors.UsageError, errors.BadConfig, errors.BadArguments)


class _Line(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = connect(self.path, self.timeout or 10.0)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Return a connected Unix socket; a path that is too long is reached through its folder. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    made.settimeout(timeout_s)
    try:
        if len(os.fsencode(path)) <= MOST_PATH:
            made.connect(str(path))
        else:
            with closing(_Folder(path.parent)) as folder:
                made.connect(f"{folder.name}/{path.name}")
    except BaseException:
        made.close()
        raise
    return made


class _Folder:
    """An open folder with the short name that the kernel gives it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.name = f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        os.close(self.descriptor)


def short_name(path: Path) -> _Folder:
    return _Folder(path.parent)
