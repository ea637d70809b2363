"""Open the daemon's sockets: a Unix socket in a folder that only this user can enter, and optionally a loopback
port."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import closing, suppress
from pathlib import Path

from autosel.client import MOST_PATH, short_name
from autosel.errors import AutoselError, UsageError
from autosel.ledger import engine

BACKLOG = 256


def unix_socket(path: Path) -> socket.socket:
    """Return a listening socket that only this user (and root) can reach. The caller holds the daemon's lock, so an
    existing socket belongs to a dead daemon. Raises AutoselError."""
    private_folder(path.parent)
    with suppress(FileNotFoundError):
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        if len(os.fsencode(path)) <= MOST_PATH:
            made.bind(str(path))
        else:
            with closing(short_name(path)) as folder:
                made.bind(f"{folder.name}/{path.name}")
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise AutoselError(
            f"cannot listen at {path}", why=str(error), todo="set AUTOSEL_HOME to another disk"
        ) from error
    finally:
        os.umask(mask)
    return made


def private_folder(folder: Path) -> None:
    """Create a private folder, or refuse one that others may enter. Raises AutoselError."""
    engine.private_folder(folder)
    info = folder.lstat()
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or mode & 0o077:
        raise AutoselError(
            f"{folder} is accessible to other users",
            why=f"owner {info.st_uid}, mode {mode:04o}; a user who can enter it could impersonate the daemon",
            todo=f"chmod 700 {folder}, if no other user has put files there",
        )


def tcp_socket(address: str) -> tuple[socket.socket, int]:
    """Return a listening socket at HOST:PORT of the loopback interface, and its port (0 requests a free one). Raises
    UsageError for any other address, AutoselError if the port is in use."""
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address({"localhost": "127.0.0.1"}.get(host, host).strip("[]"))
        number = int(port)
        if not 0 <= number < 1 << 16:
            raise ValueError(f"no such port: {number}")
    except ValueError as error:
        raise UsageError(
            f"--tcp {address!r} is not an address", why=str(error), todo="write it as 127.0.0.1:8765"
        ) from error
    if not ip.is_loopback:
        raise UsageError(
            f"--tcp {address}: only this machine may be listened on",
            why=f"{ip} can be reached from others",
            todo="listen on 127.0.0.1, and reach it through ssh -L",
        )
    made = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((str(ip), number))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise AutoselError(
            f"cannot listen on {address}", why=str(error), todo="another process has the port"
        ) from error
    return made, int(made.getsockname()[1])
