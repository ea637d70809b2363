"""Run a real PostgreSQL server for tests, as an ordinary user, with a separate data folder and only a Unix socket."""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psutil

if TYPE_CHECKING:
    import psycopg

OWNER = "postgres"  # the database's superuser, trusted over this server's private socket


def programs() -> Path | None:
    """Return the folder with `initdb` and `postgres`, newest version first; on Debian it is not on the PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True)
    found = shutil.which("initdb")
    places = [*debian, *([Path(found).resolve().parent] if found else [])]
    return next((p for p in places if (p / "initdb").exists() and (p / "postgres").exists()), None)


class Server:
    """A server, ready after `start`; `kill` sends SIGKILL to all its processes."""

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self.folder, self._bin = folder, bin_folder
        self._as = _someone()
        self._count = 0
        self.process: subprocess.Popen[str] | None = None
        if self._as:
            os.chown(folder, self._as["user"], self._as["group"])
        command = [bin_folder / "initdb", "-D", folder / "data", "-U", OWNER, "-A", "trust", "-E", "UTF8"]
        self._run(*command, "--locale=C", "--no-sync", "--no-instructions")

    def _run(self, *command: object) -> None:
        done = subprocess.run(
            [str(word) for word in command], cwd=self.folder, capture_output=True, text=True, check=False, **self._as
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Return when it accepts connections, as its latest log line says, so that tests do not wait by the clock."""
        settings = {"listen_addresses": "", "unix_socket_directories": self.folder, "max_connections": 60}
        settings["recovery_init_sync_method"] = "syncfs"  # do not sync each of a thousand files after a kill
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self.process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self.folder / "data"), *words],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
            **self._as,
        )
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "ready to accept connections" in line:
                self._reader = threading.Thread(target=deque, args=(self.process.stderr, 50), daemon=True)
                self._reader.start()  # otherwise it would wait for a reader of its output
                return
        raise AssertionError(f"the server does not start: {''.join(said)}")

    def kill(self) -> None:
        """Kill its children first: a new server waits until the last old process has released the shared memory."""
        assert self.process is not None
        own = psutil.Process(self.process.pid)
        children = own.children(recursive=True)
        own.suspend()  # stopped, so that it starts no process in the meantime
        ends = [os.pidfd_open(process.pid) for process in children]
        for process in [*children, own]:
            process.send_signal(signal.SIGKILL)
        self.process.wait()
        for end in ends:
            select.select([end], [], [])
            os.close(end)
        self._forget()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)  # immediate shutdown: its data is not needed any more
            self.process.wait()
            self._forget()

    def _forget(self) -> None:
        assert self.process is not None and self.process.stderr is not None
        self._reader.join()
        self.process.stderr.close()

    def url(self, schema: str, user: str = OWNER) -> str:
        options = quote(f"-c search_path={schema}")
        return f"postgresql+psycopg://{quote(user)}@/postgres?host={self.folder}&options={options}"

    def connect(self, schema: str = "public", login: str = OWNER) -> psycopg.Connection:
        import psycopg

        options = f"-c search_path={schema}"
        return psycopg.connect(host=str(self.folder), dbname="postgres", user=login, options=options, autocommit=True)

    def schema(self) -> str:
        """Create an empty schema for a ledger. Unlike a database, it does not need hundreds of files."""
        self._count += 1
        name = f"ledger{self._count}"
        with self.connect() as line:
            line.execute(f"CREATE SCHEMA {name}")
        return name


def _someone() -> dict[str, int]:
    """Return another user if this process runs as root, because PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get(OWNER) or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid}


@contextmanager
def server() -> Iterator[Server]:
    """Start a separate server under a short name, because a Unix socket's path has at most 107 characters."""
    bin_folder = programs()
    assert bin_folder is not None
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        made = Server(Path(folder), bin_folder)
        made.start()
        try:
            yield made
        finally:
            made.stop()
