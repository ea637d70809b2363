"""uvicorn's HTTP, with who is at the other end checked before the first byte is read, and with limits.

A peer over the Unix socket becomes the client ("uid:1000", pid); over TCP it stays (address, port).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from autosel.daemon.bind import peer
from autosel.daemon.bodies import READ_S
from autosel.daemon.writes import TARGET, Writes, is_straight

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 32 << 10  # request line and headers
MOST_LINES = {"unix": 64, "tcp": 32}  # connections at a time: of one user, of the loopback port
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

open_lines: Counter[str] = Counter()


class Protocol(HttpToolsProtocol):
    """`writes` takes writes of the ledger as our own clients send them: one at a time a connection. Whoever sends the
    next request before the answer gets that answer, and no other."""

    _kind = ""
    _head = 0
    _body: bytearray | None = None  # of a write that is being read
    _late: asyncio.TimerHandle | None = None
    _answering = _deaf = _last = False

    def __init__(self, *arguments: Any, writes: Writes, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._writes = writes

    def connection_made(self, transport: Any) -> None:
        whole: Any = Whole(transport, self.loop)
        super().connection_made(whole)
        descriptor = transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as connection:  # an event loop's own object hides getsockopt
            kind, user = "tcp", "tcp"
            if connection.family == socket.AF_UNIX:
                uid, pid = peer(connection)
                if uid not in (0, os.getuid()):
                    log.warning("refused a connection of user %d (pid %d)", uid, pid)
                    transport.abort()
                    return
                kind, user = "unix", f"uid:{uid}"
                self.client = (user, pid)
        self._kind = user
        open_lines[user] += 1
        if open_lines[user] > MOST_LINES[kind]:
            log.warning("refused a connection: %d of %s are open", open_lines[user] - 1, user)
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._kind:
            open_lines[self._kind] -= 1
            self._kind = ""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._head += len(data)
        super().data_received(data)
        if self._body is not None and self._late is None:
            self._late = self.loop.call_later(READ_S, self._too_late)
        if self._head > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._head = -(1 << 62)  # what follows is a body, which has limits of its own
        if self._answering:
            self._deaf = self._last = True
        elif self._is_write():
            self._body = bytearray()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body is not None:
            self._body += body
        elif not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        if self._body is not None:
            body = bytes(self._body)
            self._forget()
            self._answering = True
            self._writes.take(body, self._answer)
        elif not self._deaf:
            super().on_message_complete()

    def _is_write(self) -> bool:
        """One that may take the short way: from this user, over a line on which nothing is under way."""
        return (
            self.url == TARGET
            and self.parser.get_method() == b"POST"
            and self._kind.startswith("uid:")
            and (self.cycle is None or self.cycle.response_complete)
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and not self.expect_100_continue
            and is_straight(self.headers)
        )

    def _answer(self, whole: bytes) -> None:
        self._answering = False
        if self.transport.is_closing():
            return
        self.transport.write(whole)
        if self._last:
            self.transport.close()
        else:
            self.on_response_complete()  # the next one is waited for, for a while

    def _too_late(self) -> None:
        self._forget()
        self._deaf = True
        if not self.transport.is_closing():
            self.transport.write(self._writes.too_late())
            self.transport.close()

    def _forget(self) -> None:
        """What is being read."""
        self._body = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def shutdown(self) -> None:
        """What is under way is answered first."""
        if self._answering:
            self._last = True
        else:
            super().shutdown()


class Whole:
    """A transport that sends at the end of a turn of the loop what was written in it: an answer's head and body in one
    piece. Each piece wakes whoever waits for it, and on a busy machine takes our core for that."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []
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

    def abort(self) -> None:
        self._pieces = []
        self._transport.abort()


def loop_factory() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
