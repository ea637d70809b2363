"""Run a real daemon in a separate process for tests: it reports when it is ready, and ends as the test requires."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autosel.client import Client, socket_path
from tests.homes import lend_rates

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0  # a machine that takes longer to start Python is broken


@dataclass
class Daemon:
    home: Path
    process: subprocess.Popen[str]
    url: str  # of the dashboard, if it listens on a port

    def client(self) -> Client:
        return Client(socket_path(self.home), timeout_s=30.0)

    @property
    def token(self) -> str:
        return (self.home / "run" / "token").read_text().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=READY_S)


def environment(home: Path) -> dict[str, str]:
    own = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    return {**own, "AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def cli(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "autosel.cli.main", *words]
    return subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=120)


def start(home: Path, *words: str) -> Daemon:
    """Start the daemon; return when it has sent its ready message over NOTIFY_SOCKET, as to systemd."""
    lend_rates(home)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{folder}/notify")
        manager.settimeout(READY_S)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autosel.cli.main", "serve", *words],
            env={**environment(home), "NOTIFY_SOCKET": f"{folder}/notify"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            told = manager.recv(4096)
        except TimeoutError:
            process.kill()
            raise AssertionError(f"the daemon does not start: {process.communicate()[1]}") from None
    assert told.startswith(b"READY=1"), told
    assert process.stderr is not None
    url = ""
    if "--tcp" in words:
        process.stderr.readline()
        url = re.findall(r"http://\S+/", process.stderr.readline())[0]
    return Daemon(home=home, process=process, url=url)


@contextmanager
def running(home: Path, *words: str) -> Iterator[Daemon]:
    daemon = start(home, *words)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
        assert daemon.process.stderr is not None
        daemon.process.stderr.close()
