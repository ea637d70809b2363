"""Test the daemon's timeouts for each part of a request and its answer, and the connection limits per user."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from autosel.daemon import peers, protocol
from autosel.daemon.protocol import OnePiece, Protocol, limits
from tests.null.test_daemon_api_writes import PATIENCE_S, Line, over, request, spend

GET = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n"


async def trickled(line: Line, first: bytes, more: bytes) -> bytes:
    """Return the answer over another connection to the same hub: send `first` at once, then `more` repeatedly until the
    hub closes the connection."""
    loop = asyncio.get_running_loop()
    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    made = Protocol(config=line._config, server_state=line.state, app_state={})
    await loop.connect_accepted_socket(lambda: made, ours)
    found = bytearray()

    async def receive() -> None:
        with suppress(ConnectionError):
            while part := await loop.sock_recv(theirs, 4096):
                found.extend(part)

    with closing(theirs):
        await loop.sock_sendall(theirs, first)
        async with asyncio.timeout(PATIENCE_S):
            receiving = asyncio.create_task(receive())
            while not receiving.done():
                with suppress(ConnectionError):
                    await loop.sock_sendall(theirs, more)
                await asyncio.sleep(0)
            await receiving
    return bytes(found)


@pytest.mark.parametrize(
    ("patience", "first", "more", "answered"),
    [
        ({"HEAD_S": 0.05}, b"X: ", b"x", False),
        ({"HEAD_S": 0.05}, b"\r\n", b"\r\n", True),
        ({"READ_S": 0.05, "SPARE_S": 0.0}, b"Content-Length: 1000000\r\n\r\n", b"x", True),
    ],
    ids=["headers", "empty lines", "an unread body"],
)
def test_bytes_that_trickle_in_keep_no_connection_open(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patience: dict[str, float],
    first: bytes,
    more: bytes,
    answered: bool,
) -> None:
    for name, seconds in patience.items():
        monkeypatch.setattr(protocol, name, seconds)

    async def story(line: Line) -> None:
        found = await trickled(line, GET + first, more)
        assert (found.startswith(b"HTTP/1.1 200") and found.count(b"HTTP/1.1") == 1) is answered
        assert answered or found == protocol._LATE

    over(tmp_path, story)


def test_a_connection_that_sends_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.0)

    async def story(line: Line) -> None:
        assert await line.rest() == b""

    over(tmp_path, story)


def test_an_answer_is_sent_completely_even_if_the_next_request_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 60.0)

    async def story(line: Line) -> None:
        for whole, half in ((GET + b"\r\n", GET), (request(spend("a")), b"POST /v1")):
            await line.open()
            monkeypatch.setattr(protocol, "HEAD_S", 0.0)
            line.send(whole + half)
            assert (await line.answer())[0] == 200
            assert await line.rest() in (b"", protocol._LATE)
            monkeypatch.setattr(protocol, "HEAD_S", 60.0)
            line.writer.close()

    over(tmp_path, story)


def test_requests_that_come_in_time_are_answered_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the timer of one request does not affect the next."""

    async def story(line: Line) -> None:
        for _ in range(3):
            for byte in GET + b"\r\n":
                line.send(bytes([byte]))
                await line.writer.drain()
                await asyncio.sleep(0)
            assert (await line.answer())[0] == 200
            assert line.protocol._timer is None

    over(tmp_path, story)


def test_a_peer_that_does_not_read_its_answer_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SEND_S", 0.1)

    async def story(line: Line) -> None:
        line.reader._transport.pause_reading()  # type: ignore[attr-defined]
        line.send(b"GET /static/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while line.state.connections:
                await asyncio.sleep(0)

    over(tmp_path, story)


class Slow:
    """A transport whose peer reads `rate` bytes between two checks."""

    def __init__(self, waiting: int, rate: int) -> None:
        self.waiting, self.rate, self.ended = waiting, rate, ""
        self.later: list[Callable[[], None]] = []
        named = ("get_extra_info", "is_closing", "pause_reading", "resume_reading", "set_protocol", "write")
        self.transport = SimpleNamespace(
            close=lambda: None,
            abort=self.abort,
            get_write_buffer_size=lambda: self.waiting,
            **dict.fromkeys(named, print),
        )
        self.loop = SimpleNamespace(call_later=self.call_later, call_soon=print)

    def abort(self) -> None:
        self.ended, self.waiting = "aborted", 0

    def call_later(self, _: float, function: Callable[[int], None], *arguments: int) -> None:
        self.later.append(lambda: function(*arguments))

    def looks(self) -> int:
        """Return the number of checks after which no more happen."""
        count = 0
        while self.later:
            self.waiting = max(0, self.waiting - self.rate)
            self.later.pop()()
            count += 1
        return count


@pytest.mark.parametrize(("rate", "ended", "looks"), [(0, "aborted", 1), (1, "", 100), (1000, "", 1)])
def test_only_a_peer_that_reads_nothing_is_disconnected_by_a_single_check(rate: int, ended: str, looks: int) -> None:
    slow = Slow(100, rate)
    line = OnePiece(slow.transport, slow.loop)  # type: ignore[arg-type]
    line.press()
    line.press()
    line.close()
    assert (slow.looks(), slow.ended) == (looks, ended)


# --- limits per user -------------------------------------------------------------------------------------------------


def test_another_user_has_few_connections_which_do_not_count_against_ours() -> None:
    own, root, nobody, unknown = (limits("tcp", uid) for uid in (os.getuid(), 0, 65534, None))
    assert set(own.values()) == set(root.values()) == set(unknown.values()) == {protocol.MOST_LINES["tcp"]}
    assert sorted(nobody.values()) == [protocol.MOST_OF_ANOTHER, protocol.MOST_OF_OTHERS]
    assert not set(nobody) & (set(own) | set(root) | set(unknown))
    assert len({*own, *unknown}) == 2
    assert set(limits("unix", os.getuid())) != set(own)


FAR = """
import encodings.idna, os, socket, sys
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
host, port, count = sys.argv[1:]
lines = [socket.create_connection((host, int(port))) for _ in range(int(count))]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_reports_the_user_at_the_other_end_of_a_loopback_connection(family: int, host: str) -> None:
    """Compare a query for one socket with a search in the list of all; as root, use another user's process."""
    listening = socket.socket(family)
    try:
        listening.bind((host, 0))
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    with closing(listening):
        listening.listen()
        command = [sys.executable, "-S", "-c", FAR, host, str(listening.getsockname()[1]), "1"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        connection, _ = listening.accept()
        with closing(connection):
            uid = os.getuid() or 65534
            names: Any = connection.getpeername()[:2], connection.getsockname()[:2]
            assert peers.of_tcp(connection) == uid
            assert peers._listed(family, *names) == uid
            with suppress(PermissionError):  # a sandbox without netlink
                assert peers._asked(family, *names) == uid
        process.communicate()


def test_a_closed_connection_has_no_user() -> None:
    with closing(socket.socket()) as unconnected:
        assert peers.of_tcp(unconnected) is None
