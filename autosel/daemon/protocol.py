"""uvicorn's HTTP, with who is at the other end checked before the first byte is read, and with limits of each user's
connections, of sizes, and of the time that a request may take to come and an answer to be taken.

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
from autosel.daemon.writes import TARGET, Writes, is_straight

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 32 << 10  # request line and headers
MOST_LINES = {"unix": 64, "tcp": 32}  # connections at a time of this user, of root, of whom the kernel does not name
MOST_OF_ANOTHER, MOST_OF_OTHERS = 8, 32  # of another user of this machine, and of all of them together
HEAD_S = 10.0  # for the first byte on a new connection; and from a request's first byte to the end of its headers
SPARE_S = 2.0  # more than READ_S, after which whoever reads a body says that it is late
SEND_S = 30.0  # in which a peer takes some of an answer that waits
SAY_S = 10.0  # between two lines of the log about refused connections
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

open_lines: Counter[str] = Counter()


def limits(kind: str, uid: int | None) -> dict[str, int]:
    """What a connection of a user counts for, each with how many there may be."""
    own = f"{kind} of {'unknown' if uid is None else f'uid {uid}'}"
    if uid in (None, 0, os.getuid()):
        return {own: MOST_LINES[kind]}
    return {own: MOST_OF_ANOTHER, f"{kind} of other users": MOST_OF_OTHERS}


class Protocol(HttpToolsProtocol):
    """`writes` takes writes of the ledger as our own clients send them: one at a time a connection. Whoever sends the
    next request before the answer gets that answer, and no other."""

    _counted: tuple[str, ...] = ()  # in `open_lines`
    _local = False  # over the Unix socket
    _head = 0
    _body: bytearray | None = None  # of a write that is being read
    _request, _stage = 0, ""  # which is being received, and how far: "head", "body"; "" between two
    _timed: tuple[int, str] | None = None  # what the timer is for
    _timer: asyncio.TimerHandle | None = None
    _answering = _deaf = _last = False

    def __init__(self, *arguments: Any, writes: Writes, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._writes = writes

    def connection_made(self, transport: Any) -> None:
        self._whole = whole = Whole(transport, self.loop)
        super().connection_made(cast(Any, whole))
        descriptor = transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as connection:  # an event loop's own object hides getsockopt
            self._local = connection.family == socket.AF_UNIX
            if self._local:
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
        self._body = None
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
        self._head, self._stage = 0, ""
        if self._body is not None:
            body = bytes(self._body)
            self._body = None
            self._answering = True
            self._writes.take(body, self._answer)
        elif not self._deaf:
            super().on_message_complete()

    def _is_write(self) -> bool:
        """One that may take the short way: from this user, over a line on which nothing is under way."""
        return (
            self.url == TARGET
            and self.parser.get_method() == b"POST"
            and self._local
            and not self._under_way()
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

    def _under_way(self) -> bool:
        """Is an answer to be sent?"""
        return self._answering or not (self.cycle is None or self.cycle.response_complete)

    # --- time -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Give what is being received its time, once: more bytes of the same are no reprieve. A connection that waits
        for its next request after an answer is uvicorn's to end, until something comes over it."""
        now = (self._request, self._stage) if self._stage or not self._under_way() else None
        if now == self._timed:
            return
        self._unwatch()
        if now is not None and not self.transport.is_closing():
            spare = 0.0 if self._body is not None else SPARE_S
            self._timer = self.loop.call_later(READ_S + spare if self._stage == "body" else HEAD_S, self._overdue)
        self._timed = now

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        """The connection ends; an answer that is under way is sent before."""
        self._deaf = True
        if self.transport.is_closing():
            return
        if self._answering:
            self._last = True
        elif self._body is None and self._under_way():
            self.cycle.keep_alive = False
        else:
            if self._body is not None:
                self.transport.write(self._writes.too_late())
            elif self._stage == "head":
                self.transport.write(_LATE)
            self.transport.close()
        self._body = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._whole.press()

    # --- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """What is under way is answered first."""
        if self._answering:
            self._last = True
        else:
            super().shutdown()


_said: dict[str, float] = {}  # when, of refusals by what they were for


def _say_full(name: str) -> None:
    """In the log, not more often than now and then: whoever is refused may come again at once."""
    now = time.monotonic()
    if now - _said.get(name, -SAY_S) >= SAY_S:
        _said[name] = now
        log.warning("refused a connection: %d %s are open", open_lines[name], name)


class Whole:
    """A transport that sends at the end of a turn of the loop what was written in it: an answer's head and body in one
    piece. Each piece wakes whoever waits for it, and on a busy machine takes our core for that. A peer that takes
    nothing of what waits for it is left."""

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
        """From now until nothing waits: end the connection of a peer that takes nothing of it for SEND_S."""
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
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
