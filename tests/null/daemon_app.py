"""Run the daemon's application over a real ledger, without a socket; tests choose the caller's identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from autosel.daemon.access import Access
from autosel.daemon.app import build
from autosel.daemon.hub import Hub, Options
from autosel.daemon.jobs import Jobs
from autosel.ledger.faults import Fault
from autosel.values import Decision

PORT = 8765
TOKEN = "t" * 43
ACCESS = Access.over_tcp(PORT, TOKEN, ["https://listed.example"])
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class App:
    """Create the hub at start-up in the event loop that serves, and close it there."""

    def __init__(self, home: Path, options: Options | None = None) -> None:
        (home / "run").mkdir(parents=True, exist_ok=True)
        self.home, self.options = home, options or Options()
        self.hub: Any = None
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        self.hub = Hub(self.home, self.options)
        self._app = build(self.hub, ACCESS)
        await self.hub.reload()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.hub.close()
        await send({"type": "lifespan.shutdown.complete"})


def over_tcp(app: App) -> TestClient:
    """Return a client of the loopback port: anyone on this machine, or a web page."""
    return TestClient(app, base_url=f"http://127.0.0.1:{PORT}", client=("127.0.0.1", 40000))


def over_socket(app: App) -> TestClient:
    """Return a client of the Unix socket, whose user the kernel reports."""
    return TestClient(app, base_url="http://localhost", client=("uid:1000", 4711))


def fault_of(decision: Decision) -> Fault:
    return Fault(
        cause="kernel",
        reason="row 3 is wrong",
        decision=decision,
        workload=decision.workload.key,
        evidence={"row": 3, "got": float("nan")},
        seen_at="2026-01-01T00:00:00+00:00",
    )


def queue_in(folder: Path) -> Jobs:
    return Jobs(folder / "jobs.json", busy_limit=0.5, tell=lambda *_: None, ended=lambda _: None)
