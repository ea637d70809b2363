"""Identify the process at the other end of a connection, through the kernel."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
ANY = 0xFFFFFFFF  # all states, and no cookie
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, pid
_QUESTION = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states; then the socket
_UID = struct.Struct("=I")
UID_AT = 64  # offsets in inet_diag_msg
PROC = Path("/proc/net")

Address = tuple[str, int]


def of_unix(connection: socket.socket) -> tuple[int, int]:
    """Return (uid, pid) of the process at the other end of a Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid, pid


def of_tcp(connection: socket.socket) -> int | None:
    """Return the uid of the process of this machine at the other end of a TCP connection; None if it has closed the
    connection, or the kernel does not tell."""
    try:
        there, here = connection.getpeername()[:2], connection.getsockname()[:2]
        try:
            return _asked(connection.family, there, here)
        except OSError:  # no netlink, or no module that answers
            return _listed(connection.family, there, here)
    except (OSError, ValueError):
        return None


def _asked(family: int, there: Address, here: Address) -> int:
    """Ask about this one socket. Raises OSError if nothing answers, or there is no such socket."""
    hosts = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (there, here))
    which = struct.pack("!HH", there[1], here[1]) + hosts + struct.pack("=III", 0, ANY, ANY)  # interface, cookie
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, ANY) + which
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_HEADER.pack(_HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + question)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        raise OSError("the kernel knows no such socket")
    uid: int = _UID.unpack_from(answer, _HEADER.size + UID_AT)[0]
    return uid


def _listed(family: int, there: Address, here: Address) -> int | None:
    """Search the list of all sockets. Raises OSError, ValueError."""
    name = "tcp6" if family == socket.AF_INET6 else "tcp"
    wanted = [_as_listed(family, there), _as_listed(family, here)]
    with (PROC / name).open() as lines:
        found = next((fields for line in lines if (fields := line.split())[1:3] == wanted), None)
    return int(found[7]) if found else None


def _as_listed(family: int, address: Address) -> str:
    raw = socket.inet_pton(family, address[0])
    words = struct.unpack(f"={len(raw) // 4}I", raw)  # as the kernel prints them: in the byte order of the machine
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"
