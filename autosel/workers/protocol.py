"""Exchange frames with a worker: a 4-byte length and strict JSON, at most 1 MiB, and file descriptors.

Messages are data only: nothing that arrives is executed, unpickled or trusted to be well formed. One deadline covers a
whole frame, so sending half a frame is treated like sending nothing.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from autosel.values import parse_json

MAX_BYTES = 1 << 20
MAX_FDS = 8
_HEADER = struct.Struct("<I")


class ProtocolError(Exception):
    """Raised if the peer sent something that is not a frame."""


class ClosedError(Exception):
    """Raised if the peer's end is closed."""


class LateError(Exception):
    """Raised if the frame was not completely received, or sent, by the deadline."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode the message as a frame. Raises ValueError if it is not JSON (NaN included) or too large."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_BYTES}")
    return _HEADER.pack(len(body)) + body


def send(peer: socket.socket, frame: bytes, fds: Sequence[int] = (), *, until: float | None = None) -> None:
    """Send a whole frame by `until` (monotonic seconds; None: no deadline); descriptors travel with its first bytes."""
    view = memoryview(frame)
    while view:
        wait(peer, select.POLLOUT, until)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            count = peer.sendmsg([view], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            fds = ()
        except BlockingIOError:
            continue
        except (BrokenPipeError, ConnectionError) as error:
            raise ClosedError from error
        view = view[count:]


def receive(peer: socket.socket, *, until: float | None = None) -> tuple[dict[str, Any], list[int]]:
    """Return the next complete message and the descriptors sent with it. Raises ProtocolError, ClosedError or
    LateError."""
    fds: list[int] = []
    try:
        (length,) = _HEADER.unpack(_exactly(peer, _HEADER.size, until, fds))
        if length > MAX_BYTES:
            raise ProtocolError(f"a frame claims {length} bytes; the limit is {MAX_BYTES}")
        message = parse_json(_exactly(peer, length, until, fds), what="message")
        if not isinstance(message, dict):
            raise ProtocolError(f"a message is an object, not {type(message).__name__}")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValueError):
            raise ProtocolError(str(error)) from error
        raise
    return message, fds


def _exactly(peer: socket.socket, count: int, until: float | None, fds: list[int]) -> bytes:
    parts: list[bytes] = []
    while count:
        wait(peer, select.POLLIN, until)
        try:
            # Not socket.recv_fds: it drops its flags argument (CPython 3.11).
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            data, rights, _, _ = peer.recvmsg(min(count, 1 << 16), socket.CMSG_SPACE(MAX_FDS * 4), flags)
        except BlockingIOError:
            continue
        except ConnectionError as error:
            raise ClosedError from error
        for level, kind, payload in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += array("i", payload[: len(payload) // 4 * 4])
        if not data:
            raise ClosedError
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def wait(peer: socket.socket, event: int, until: float | None) -> None:
    """Block until the socket is ready. Raises LateError past the deadline."""
    poll = select.poll()
    poll.register(peer, event)
    while True:
        left = None if until is None else (until - time.monotonic()) * 1000
        if left is not None and left <= 0:
            raise LateError
        if poll.poll(left):
            return
