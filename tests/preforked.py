"""Fork workers from a process that has imported torch, for tests that do not test how a worker starts.

A worker of autosel is a new interpreter, in which importing torch takes about 2 s of CPU time. A file of tests that
starts many workers sets

    pytestmark = pytest.mark.usefixtures("preforked")

Guardian, limits, environment, protocol and the end of a worker stay the product's own; only `exec` is replaced.
tests/cpu/test_workers.py and every command that a test runs as a process start real ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch", "autosel.ops", "autosel.candidates.load", "autosel.workers.child")
MESSAGE_BYTES = 1 << 20
ANSWER_S = 120.0  # time to import torch on a slow disk


# --- the side of the test ---------------------------------------------------------------------------------------------


class Forked:
    """Act like a `Popen` for `Worker`, for a guardian that is not a child of this process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self.pidfd = pid, pidfd

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self) -> None:
        if self.pidfd >= 0:
            select.select([self.pidfd], [], [])
            os.close(self.pidfd)
            self.pidfd = -1


class Nursery:
    """The process from which workers are forked. It ends with this one."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.settimeout(ANSWER_S)
        self.lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=(theirs.fileno(),),
            )

    def start_guardian(self, config: Mapping[str, Any], environment: Mapping[str, str], fds: Sequence[int]) -> Forked:
        """Replace the function of this name in autosel/workers/process.py."""
        told = {"config": dict(config), "environment": dict(environment)}
        with self.lock:
            socket.send_fds(self.line, [json.dumps(told).encode()], fds)
            pid, (pidfd,), _, _ = socket.recv_fds(self.line, 64, 1)
        return Forked(int(pid), pidfd)

    def descendants(self) -> list[int]:
        """Return all present guardians and workers, and processes that workers have left behind."""
        found, todo = [], [self.process.pid]
        while todo:
            for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    todo += (children := [int(pid) for pid in task.read_text().split()])
                    found += [pid for pid in children if lives(pid)]
        return found

    def close(self) -> None:
        self.line.close()
        self.process.wait()


def lives(pid: int) -> bool:
    """Return False for a process that has ended and has not been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the side of the nursery ------------------------------------------------------------------------------------------


def serve(line: socket.socket) -> None:
    """Fork a guardian for each message until the other side is closed."""
    guardian = load_guardian()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # imported modules stay shared with the children
    guardian.prctl(guardian.PR_SET_CHILD_SUBREAPER, 1)  # adopts processes that a guardian could not end
    while True:
        message, fds, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 2)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # guardians that have ended
                pass
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            be_guardian(guardian, json.loads(message), fds, line)
        pidfd = os.pidfd_open(pid)
        for fd in fds:
            os.close(fd)
        socket.send_fds(line, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def load_guardian() -> Any:
    """Load guardian.py as a module; it is run by path, and imports no module of autosel."""
    spec = importlib.util.spec_from_file_location("guardian", ROOT / "autosel" / "workers" / "guardian.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def be_guardian(guardian: Any, told: dict[str, Any], fds: Sequence[int], line: socket.socket) -> NoReturn:
    """Do the work of `python -I -S guardian.py CONFIG` in a worker's environment, with these descriptors open."""
    try:
        line.close()
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.close(null)
        take_environment(told["environment"])
        config = told["config"]
        config["control_fd"], config["life_fd"] = fds
        config["argv"][-2] = str(fds[0])
        os.execv = become_worker  # type: ignore[assignment]
        sys.argv = ["guardian.py", json.dumps(config)]
        guardian.main()
    except BaseException:
        os._exit(1)
    os._exit(0)


def take_environment(given: Mapping[str, str]) -> None:
    """Do what an interpreter does at its start: set variables and the module path, run sitecustomize."""
    os.environ.clear()
    os.environ.update(given)
    sys.path[:0] = given["PYTHONPATH"].split(os.pathsep)
    tempfile.tempdir = None
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def become_worker(_: str, argv: Sequence[str]) -> NoReturn:
    """Replace a fresh interpreter: `python -P -m autosel.workers.child ENTRY FD THREADS`."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            if not os.get_inheritable(fd):
                os.close(fd)
    child = sys.modules["__main__"] = sys.modules["autosel.workers.child"]
    entry, control_fd, threads = argv[-3:]
    sys.argv = [str(child.__file__), *argv[-3:]]
    code = 0
    try:
        child.main(entry, int(control_fd), int(threads))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as to_the_tests:
        serve(to_the_tests)
