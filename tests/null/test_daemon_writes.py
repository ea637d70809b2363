"""Test ledger writes on the short path over real connections: the answers of the long path, one write at a time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from uvicorn.server import ServerState

from autosel.daemon import protocol
from autosel.daemon.access import Access
from autosel.daemon.app import build
from autosel.daemon.hub import Hub, Options
from autosel.daemon.protocol import Protocol
from autosel.daemon.writes import MOST_STRAIGHT_BYTES, Writes
from autosel.ledger import commands, open_ledger

PATIENCE_S = 60.0  # timeout for an answer that never comes


class Line:
    """Open a connection to a new hub, as the daemon serves it."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.writes, self.state = hub, Writes(hub), ServerState()
        self.taken = 0
        self._config = uvicorn.Config(build(hub, Access()), lifespan="off", ws="none", log_config=None)

    async def open(self) -> None:
        theirs, ours = socket.socketpair()
        take = self.writes.take

        def counted(body: bytes, done: Callable[[bytes], None]) -> None:
            self.taken += 1
            take(body, done)

        self.writes.take = counted  # type: ignore[method-assign]
        made = Protocol(config=self._config, server_state=self.state, app_state={}, writes=self.writes)
        self.protocol = made
        await asyncio.get_running_loop().connect_accepted_socket(lambda: made, ours)
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, Any]:
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = next(x for x in head.lower().split("\r\n") if x.startswith("content-length:")).split(":")[1]
            return int(head.split()[1]), json.loads(await self.reader.readexactly(int(length)))

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()


def over(home: Path, story: Callable[[Line], Awaitable[None]]) -> None:
    async def run() -> None:
        hub = Hub(home, Options(tune=False))
        line = Line(hub)
        await line.open()
        try:
            await story(line)
        finally:
            line.writer.close()
            with suppress(ConnectionError):
                await line.writer.wait_closed()
            await hub.close()

    asyncio.run(run())


def spend(key: str, amount: float = 0.001) -> bytes:
    return json.dumps(commands.encode(commands.Spend(key=key, amount=amount, reason=""), {})).encode()


def request(body: bytes, *more: str, kind: str = "application/json") -> bytes:
    lines = ["POST /v1/ledger HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *more, "", ""]).encode() + body


def spent(home: Path, key: str) -> float:
    with open_ledger(home=home, alone=True) as ledger:
        return round(ledger.spent(key), 9)


def test_a_write_in_one_piece_and_one_byte_by_byte_are_on_disk_when_acknowledged(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        line.send(request(spend("a")))
        assert await line.answer() == (200, True)
        for byte in request(spend("a")):
            line.send(bytes([byte]))
            await line.writer.drain()
            await asyncio.sleep(0)
        assert await line.answer() == (200, True)
        assert line.hub.ledger.spent("a") == pytest.approx(0.002)
        assert line.taken == 2
        line.send(b"GET /v1/ledger HTTP/1.1\r\nHost: localhost\r\n\r\n")  # the other kind, on the same connection
        assert (await line.answer())[0] == 200
        line.send(request(spend("a")))
        assert await line.answer() == (200, True)

    over(tmp_path, story)
    assert spent(tmp_path, "a") == 0.003


WRONG = {
    "no JSON": (b"{", 400),
    "no text": (b"\xff\xfe", 400),
    "a key twice": (b'{"a": 1, "a": 2}', 400),
    "too deep": (b"[" * 40 + b"]" * 40, 400),
    "nothing": (b"", 400),
    "no command": (b'{"command": {"call": "drop"}, "leases": {}}', 422),
    "a field of another type": (spend("a").replace(b'"a"', b"5"), 422),
    "a number too large to store": (b'{"command": 36893488147419103232000, "leases": {}}', 422),
    "more than there is": (spend("a", 2.0), 409),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_equal_on_the_short_and_the_long_path_and_the_line_stays_open(tmp_path: Path, name: str) -> None:
    body, status = WRONG[name]

    async def story(line: Line) -> None:
        line.send(request(body))
        short = await line.answer()
        assert line.taken == 1
        line.send(request(body, kind="application/json; charset=utf-8"))
        assert short == await line.answer()
        assert line.taken == 1, "that request must take the long path"
        assert short[0] == status or (name == "more than there is" and short == (200, False))
        if short[0] != 200:
            assert short[1]["error"]["what"]
        line.send(request(spend("after")))
        assert await line.answer() == (200, True)

    over(tmp_path, story)


@pytest.mark.parametrize("header", ["Origin: https://elsewhere.example", "Expect: 100-continue", "Host: two"])
def test_other_requests_take_the_long_path(tmp_path: Path, header: str) -> None:
    async def story(line: Line) -> None:
        line.send(request(spend("a"), header))
        if header.startswith("Expect"):
            assert (await line.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        status, _ = await line.answer()
        assert status == (403 if header.startswith("Origin") else 200)
        large = spend("a" * MOST_STRAIGHT_BYTES)
        line.send(request(large))
        assert await line.answer() == (200, True)
        assert line.taken == 0

    over(tmp_path, story)


def test_the_first_of_two_pipelined_writes_is_answered_and_the_line_ends(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        line.send(request(spend("first")) + request(spend("second")))
        assert await line.answer() == (200, True)
        assert await line.rest() == b""
        assert line.taken == 1

    over(tmp_path, story)
    assert (spent(tmp_path, "first"), spent(tmp_path, "second")) == (0.001, 0.0)


def test_a_running_write_is_answered_before_a_stop_and_completes_if_the_caller_disconnects(tmp_path: Path) -> None:
    held, go = threading.Event(), threading.Event()

    async def story(line: Line) -> None:
        line.hub.writer.submit(lambda _: (held.set(), go.wait()))
        held.wait()
        line.send(request(spend("a")))
        while not line.taken:
            await asyncio.sleep(0)
        line.protocol.shutdown()
        go.set()
        assert await line.answer() == (200, True)
        assert await line.rest() == b""
        held.clear()
        go.clear()
        await line.open()
        line.hub.writer.submit(lambda _: (held.set(), go.wait()))
        held.wait()
        line.send(request(spend("b")))
        while line.taken < 2:
            await asyncio.sleep(0)
        line.writer.close()
        while line.state.connections:
            await asyncio.sleep(0)
        go.set()

    over(tmp_path, story)
    assert (spent(tmp_path, "a"), spent(tmp_path, "b")) == (0.001, 0.001)


def test_a_missing_body_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "READ_S", 0.0)

    async def story(line: Line) -> None:
        line.send(request(spend("a"))[:-1])
        status, told = await line.answer()
        assert status == 408 and "did not come" in told["error"]["what"]
        assert await line.rest() == b""
        assert line.taken == 0

    over(tmp_path, story)
    assert spent(tmp_path, "a") == 0.0
