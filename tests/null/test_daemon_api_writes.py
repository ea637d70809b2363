"""Test ledger writes over real connections."""

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

from autosel.daemon import bodies
from autosel.daemon.access import Access
from autosel.daemon.app import build
from autosel.daemon.hub import Hub, Options
from autosel.daemon.protocol import Protocol
from autosel.ledger import commands, open_ledger

PATIENCE_S = 60.0  # timeout for an answer that never comes


class Line:
    """Open a connection to a new hub, as the daemon serves it."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.state = hub, ServerState()
        self._config = uvicorn.Config(build(hub, Access()), lifespan="off", ws="none", log_config=None)

    async def open(self) -> None:
        theirs, ours = socket.socketpair()
        made = Protocol(config=self._config, server_state=self.state, app_state={})
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


def request(body: bytes) -> bytes:
    lines = ("POST /v1/ledger HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


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

    over(tmp_path, story)
    assert spent(tmp_path, "a") == 0.002


WRONG = {
    "no JSON": (b"{", 400),
    "no text": (b"\xff\xfe", 400),
    "a key twice": (b'{"a": 1, "a": 2}', 400),
    "too deep": (b"[" * 40 + b"]" * 40, 400),
    "nothing": (b"", 400),
    "no command": (b"{}", 422),
    "an empty command": (b'{"command": {}, "leases": {}}', 422),
    "an unknown command": (b'{"command": {"call": "drop"}, "leases": {}}', 422),
    "an amount that is text": (spend("a").replace(b"0.001", b'"1"'), 422),
    "a lease that is text": (spend("a").replace(b'"leases": {}', b'"leases": {"hw": "x"}'), 422),
    "no name": (b'{"command": {"call": ["spend"]}, "leases": {}}', 422),
    "a field of another type": (spend("a").replace(b'"a"', b"5"), 422),
    "a number too large to store": (b'{"command": 36893488147419103232000, "leases": {}}', 422),
    "an unknown decision": (b'{"command": {"call": "demote", "decision_id": 7, "reason": "x"}, "leases": {}}', 409),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_write_is_refused_with_the_reason_and_the_line_stays_open(tmp_path: Path, name: str) -> None:
    body, expected = WRONG[name]

    async def story(line: Line) -> None:
        line.send(request(body))
        status, told = await line.answer()
        assert status == expected and told["error"]["what"]
        line.send(request(spend("after")))
        assert await line.answer() == (200, True)

    over(tmp_path, story)


def test_a_running_write_is_answered_before_a_stop_and_completes_if_the_caller_disconnects(tmp_path: Path) -> None:
    held, go = threading.Event(), threading.Event()

    async def story(line: Line) -> None:
        line.hub.writer.submit(lambda _: (held.set(), go.wait()))
        held.wait()
        line.send(request(spend("a")))
        while not line.hub.writer.waiting:
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
        while not line.hub.writer.waiting:
            await asyncio.sleep(0)
        line.writer.close()
        while line.state.connections:
            await asyncio.sleep(0)
        go.set()

    over(tmp_path, story)
    assert (spent(tmp_path, "a"), spent(tmp_path, "b")) == (0.001, 0.001)


def test_a_missing_body_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_S", 0.0)

    async def story(line: Line) -> None:
        line.send(request(spend("a"))[:-1])
        status, told = await line.answer()
        assert status == 408 and "did not come" in told["error"]["what"]

    over(tmp_path, story)
    assert spent(tmp_path, "a") == 0.0
