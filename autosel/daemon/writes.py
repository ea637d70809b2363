"""Handle a write of the ledger on the short path: from the parsed request to the writer and back, in callbacks of the
loop.

A framework's task, request and answer cost more of the loop's time than the rest of a write, and on a busy machine this
time limits the write rate. `Protocol` passes the writes of autosel's clients here; all other requests take the long
path (`api.write_ledger`), with the same result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from autosel.daemon.answers import encoded, our_bug, problem, refusal
from autosel.daemon.bodies import READ_S, Bad, Limits, parsed
from autosel.daemon.writer import Work
from autosel.errors import AutoselError
from autosel.ledger import commands

if TYPE_CHECKING:
    from autosel.daemon.hub import Hub

log = logging.getLogger(__name__)

TARGET = commands.ADDRESS.encode()
MOST_STRAIGHT_BYTES = 256 << 10  # bytes of a body; larger ones are read piece by piece
COMMAND = Limits(size=commands.MOST_BYTES, depth=32, text=commands.MOST_BYTES, number=1 << 64)


def command_of(body: Any) -> Work:
    """Return the command in a body. Raises Bad."""
    try:
        command, leases = commands.decode(body)
    except ValueError as error:
        raise Bad(422, "this is not a command of the ledger", why=str(error)[:300]) from error
    return lambda ledger: ledger.write(command, leases=leases)


def is_straight(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return True for JSON of a stated length, with each header once and none from a web page."""
    found = dict(headers)
    length = found.get(b"content-length", b"")
    return (
        len(found) == len(headers)
        and found.get(b"content-type") == b"application/json"
        and length.isdigit()
        and len(length) < 9
        and int(length) <= MOST_STRAIGHT_BYTES
        and b"transfer-encoding" not in found
        and b"origin" not in found
    )


class Writes:
    """Accept writes. `take` calls `done` with the complete answer once the write is on disk, or with the refusal."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._acknowledged = hub.metrics.requests.labels(commands.ADDRESS, "200")

    def take(self, body: bytes, done: Callable[[bytes], None]) -> None:
        started = time.perf_counter()
        try:
            future = self.hub.writer.submit_here(command_of(parsed(body, COMMAND)))
        except Exception as error:
            self._refuse(error, started, done)
        else:
            future.add_done_callback(partial(self._settled, started, done))

    def too_late(self) -> bytes:
        return self._whole(problem(408, f"the body did not come within {READ_S:.0f} s"))

    def _settled(self, started: float, done: Callable[[bytes], None], future: asyncio.Future[Any]) -> None:
        try:
            body = encoded(future.result())
        except Exception as error:  # for any error, because no caller may wait for ever
            self._refuse(error, started, done)
            return
        self._acknowledged.inc()
        self.hub.metrics.seconds.observe(time.perf_counter() - started)
        done(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def _refuse(self, error: Exception, started: float, done: Callable[[bytes], None]) -> None:
        if isinstance(error, AutoselError):
            made = refusal(self.hub, error)
        else:
            log.error("POST %s failed", commands.ADDRESS, exc_info=error)
            made = our_bug(error)
        self.hub.metrics.seconds.observe(time.perf_counter() - started)
        done(self._whole(made))

    def _whole(self, made: Response) -> bytes:
        """Return a refusal as bytes, and count it."""
        self.hub.metrics.requests.labels(commands.ADDRESS, str(made.status_code)).inc()
        head = [f"HTTP/1.1 {made.status_code} {HTTPStatus(made.status_code).phrase}".encode()]
        head += [name + b": " + value for name, value in made.raw_headers]
        return b"\r\n".join([*head, b"", bytes(made.body)])
