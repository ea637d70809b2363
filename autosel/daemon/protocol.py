"""Extend uvicorn's HTTP: identify the peer before the first byte is read; limit each user's connections, sizes, and the
time for a request to arrive and for an answer to be read.

A peer over the Unix socket becomes the client ("uid:1000", pid); over TCP it stays (address, port).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from autosel.daemon import peers
from autosel.daemon.bodies import READ_S

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 32 << 10  # request line and headers
# connections at a time of this user, of root, and of users that the kernel does not name
MOST_LINES = {"unix": 64, "tcp": 32}
MOST_OF_ANOTHER, MOST_OF_OTHERS = 8, 32  # of another user of this machine, and of all of them together
HEAD_S = 10.0  # for the first byte on a new connection; and from a request's first byte to the end of its headers
SPARE_S = 2.0  # more than READ_S, after which the reader of a body reports that it is late
SEND_S = 30.0  # time in which a peer must read part of a waiting answer
SAY_S = 10.0  # pause between two log lines about refused connections
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

open_lines: Counter[str] = Counter()


def limits(kind: str, uid: int | None) -> dict[str, int]:
    """Return the limits that apply to a user's connection."""
    own = f"{kind} of {'unknown' if uid is None else f'uid {uid}'}"
    if uid in (None, 0, os.getuid()):
        return {own: MOST_LINES[kind]}
    return {own: MOST_OF_ANOTHER, f"{kind} of other users": MOST_OF_OTHERS}


class Protocol(HttpToolsProtocol):
    """Handle a connection."""

    _counted: tuple[str, ...] = ()  # in `open_lines`
    _head = 0
    _request, _stage = 0, ""  # the part that is arriving: "head" or "body"; "" between requests
    _timed: tuple[int, str] | None = None  # the timer's purpose
    _timer: asyncio.TimerHandle | None = None
    _deaf = False

    def connection_made(self, transport: Any) -> None:
        self._whole = whole = OnePiece(transport, self.loop)
        super().connection_made(cast(Any, whole))
        descriptor = transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as connection:  # an event loop's own object hides getsockopt
            if connection.family == socket.AF_UNIX:
                uid, pid = peers.of_unix(connection)
                if uid not in (0, os.getuid()):
                    log.warning("refused a connection of user %d (pid %d)", uid, pid)
                    transport.abort()
                    return
                self.client = (f"uid:{uid}", pid)
                counted = limits("unix", uid)
            else:
                counted = limits("tcp", peers.of_tcp(connection))
        full = next((name for name, most in counted.items() if open_lines[name] >= most), "")
        if full:
            _say_full(full)
            self._deaf = True
            whole.write(_FULL)
            whole.close()
            return
        self._counted = tuple(counted)
        open_lines.update(self._counted)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        open_lines.subtract(self._counted)
        self._counted = ()
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._head += len(data)
        super().data_received(data)
        if self._head > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_LARGE)
            self.transport.close()
        self._watch()

    def on_message_begin(self) -> None:
        self._request, self._stage = self._request + 1, "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stage = "body"
        self._head = -(1 << 62)  # a body follows, which has separate limits
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head, self._stage = 0, ""
        super().on_message_complete()

    def _under_way(self) -> bool:
        """Return True if an answer is still to be sent."""
        return not (self.cycle is None or self.cycle.response_complete)

    # --- time -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the timeout of the part that is arriving, once: more bytes do not extend it. uvicorn ends a connection
        that waits for its next request, until bytes arrive."""
        now = (self._request, self._stage) if self._stage or not self._under_way() else None
        if now == self._timed:
            return
        self._unwatch()
        if now is not None and not self.transport.is_closing():
            patience_s = READ_S + SPARE_S if self._stage == "body" else HEAD_S
            self._timer = self.loop.call_later(patience_s, self._overdue)
        self._timed = now

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        """End the connection, after sending an answer that is under way."""
        self._deaf = True
        if self.transport.is_closing():
            return
        if self._under_way():
            self.cycle.keep_alive = False
        else:
            if self._stage == "head":
                self.transport.write(_LATE)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._whole.press()


_said: dict[str, float] = {}  # time of the last log line, by the kind of refusal


def _say_full(name: str) -> None:
    """Log refusals, at most now and then, because a refused client may return at once."""
    now = time.monotonic()
    if now - _said.get(name, -SAY_S) >= SAY_S:
        _said[name] = now
        log.warning("refused a connection: %d %s are open", open_lines[name], name)


class OnePiece:
    """Send the parts written in one turn of the event loop together: an answer's head and body in one piece. Each piece
    wakes the reader, which may take the daemon's core on a busy machine. A peer that reads nothing is disconnected."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []
        self._pressing = False
        for name in ("get_extra_info", "is_closing", "pause_reading", "resume_reading", "set_protocol"):
            setattr(self, name, getattr(transport, name))

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._send)
        self._pieces.append(data)

    def _send(self) -> None:
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._transport.write(b"".join(pieces))

    def close(self) -> None:
        self._send()
        self._transport.close()
        self.press()

    def press(self) -> None:
        """From now until nothing waits, end the connection of a peer that reads nothing for SEND_S."""
        waiting = self._transport.get_write_buffer_size()
        if waiting and not self._pressing:
            self._pressing = True
            self._loop.call_later(SEND_S, self._pressed, waiting)

    def _pressed(self, before: int) -> None:
        self._pressing = False
        if self._transport.get_write_buffer_size() >= before:
            self._transport.abort()
        else:
            self.press()

    def abort(self) -> None:
        self._pieces = []
        self._transport.abort()


def loop_factory() -> asyncio.AbstractEventLoop:
    """Use uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
