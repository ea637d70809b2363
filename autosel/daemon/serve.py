"""Run the daemon of a home until a signal arrives; it reports when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from autosel import client, settings
from autosel.daemon import bind, upkeep
from autosel.daemon.access import Access
from autosel.daemon.app import build
from autosel.daemon.hub import Hub, Options
from autosel.daemon.protocol import Protocol, loop_factory
from autosel.errors import AutoselError
from autosel.ledger.durable import replace_private
from autosel.ledger.engine import private_folder
from autosel.ledger.locks import InUseError, daemon_lock

log = logging.getLogger(__name__)
SWITCH_S = 0.002  # limit for holding the interpreter, so that a lookup waits no longer
GRACE_S = 3  # for running requests, at the end
TOKEN = "token"  # noqa: S105  (the name of its file)


def serve(options: Options, home: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises AutoselError if another daemon serves this home, or no socket can be
    opened."""
    home = home or settings.home()
    private_folder(home)
    sys.setswitchinterval(SWITCH_S)
    with _only_one(home), contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(bind.unix_socket(client.socket_path(home)))]
        access, address = Access(), ""
        if options.tcp:
            opened, port = bind.tcp_socket(options.tcp)
            sockets.append(stack.enter_context(opened))
            access = Access.over_tcp(port, secrets.token_urlsafe(32), options.origins)
            address = f"http://{options.tcp.rpartition(':')[0]}:{port}/"
            replace_private(client.socket_path(home).parent / TOKEN, access.token + "\n")  # new at each start
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(home, replace(options, address=address), access, sockets))


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    try:
        with daemon_lock(home):
            yield
    except InUseError as error:
        raise AutoselError(
            f"a daemon serves {home} already", why=error.why, todo=f"{settings.spelling()} status"
        ) from error


async def _serve(home: Path, options: Options, access: Access, sockets: list[socket.socket]) -> None:
    hub = Hub(home, options)
    config = uvicorn.Config(
        build(hub, access),
        http=Protocol,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # uvicorn must not identify the caller
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        limit_concurrency=512,
    )
    server = _Server(config, hub)
    duties: list[asyncio.Task[Any]] = []
    try:
        await hub.reload()
        wanted = [upkeep.watch, upkeep.listen, upkeep.look_after, *([upkeep.tune] if options.tune else [])]
        duties = [asyncio.create_task(_kept_up(duty, hub)) for duty in wanted]
        await server.serve(sockets=sockets)
    finally:
        notify("STOPPING=1")
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            client.socket_path(home).unlink()
        await hub.close()


async def _kept_up(duty: Callable[[Hub], Awaitable[None]], hub: Hub) -> None:
    """Run a duty for ever. A failure is a bug; the duty starts again, while lookups and writes continue."""
    while True:
        try:
            await duty(hub)
            return
        except Exception:
            log.exception("a duty of the daemon failed, and starts again")
            await asyncio.sleep(5.0)


class _Server(uvicorn.Server):
    """Report when it is ready; at the first signal end all lines of events, so that none delays the stop."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self.hub = hub

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        notify(f"READY=1\nSTATUS=serving {self.hub.home}")
        say(self.hub)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise the signal again after serving, before the daemon has cleaned up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.hub.loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.hub.events.close()
        self.should_exit = True


def say(hub: Hub) -> None:
    where = client.socket_path(hub.home)
    lines = [f"serving {where}"]
    if hub.options.address:
        lines.append(f"dashboard {hub.options.address}   token in {where.parent / TOKEN}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


# --- service manager ------------------------------------------------------------------------------------------------


def notify(state: str) -> None:
    """Notify the service manager, if there is one (sd_notify)."""
    address = settings.notify_socket()
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
        try:
            line.connect("\0" + address[1:] if address.startswith("@") else address)
            line.sendall(state.encode())
        except OSError as error:
            log.warning("the service manager could not be told: %s", error)


def unit(command: str, home: Path) -> str:
    """Return a systemd user unit, without MemoryDenyWriteExecute (compilers of kernels write code) and PrivateDevices
    (GPUs)."""
    return f"""[Unit]
Description=autosel: measured kernel selection
Documentation=https://www.freedesktop.org/software/systemd/man/systemd.service.html

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Environment="AUTOSEL_HOME={home}"
Restart=on-failure
RestartSec=2
KillMode=control-group
TimeoutStopSec=20
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths="{home}"
UMask=0077
LimitCORE=0
OOMPolicy=continue

[Install]
WantedBy=default.target
"""
