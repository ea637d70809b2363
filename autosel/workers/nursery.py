"""Fork workers from a process that has imported PyTorch: a new interpreter takes 1.5 s of CPU time for that.

    with Nursery("autosel.parity.child") as nursery:
        with Worker("autosel.parity.child:serve", nursery=nursery) as worker: ...

Only `exec` is replaced: guardian, limits, environment, protocol and the end of a worker are those of every worker. The
nursery itself runs no candidate and starts no thread. It is for workers on the CPU that are not timed: a driver of a
GPU must start in the process that uses it, and a race compares processes, whose addresses differ only in new ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
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

from autosel.workers import guardian
from autosel.workers.process import START_S, environment_of, silent, start_guardian

MESSAGE_BYTES = 1 << 20


# --- the side of the parent -------------------------------------------------------------------------------------------


class Forked:
    """The part of a `Popen` that a worker uses, for a guardian that is not a child of this process."""

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
    """The process from which workers are forked. It starts with the first one, and ends with this process at the
    latest. If it does not work, workers are new interpreters, which report what is wrong."""

    def __init__(self, *imports: str) -> None:
        """`imports`: the modules that the workers need."""
        self.imports = imports
        self.process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._lock, self._lost = threading.Lock(), False

    def start_guardian(
        self, config: Mapping[str, Any], environment: Mapping[str, str], fds: Sequence[int]
    ) -> Forked | subprocess.Popen[bytes]:
        """Do what process.start_guardian does, by a fork."""
        message = json.dumps({"config": dict(config), "environment": dict(environment)}).encode()
        with self._lock:
            if not self._lost:
                try:
                    return self._forked(message, fds)
                except (OSError, ValueError):  # it has ended, it hangs, or it cannot fork
                    self._lost = True
                    self.close()  # a late fork would be a second worker
        return start_guardian(config, environment, fds)

    def _forked(self, message: bytes, fds: Sequence[int]) -> Forked:
        line = self._started()
        socket.send_fds(line, [message], fds)
        pid, pidfds, _, _ = socket.recv_fds(line, 64, 1)
        if not pidfds:
            raise OSError("the nursery has ended")
        return Forked(int(pid), pidfds[0])

    def _started(self) -> socket.socket:
        if self._line is None:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._line.settimeout(START_S)
            with theirs:
                words = ["-P", "-m", "autosel.workers.nursery", str(theirs.fileno()), *self.imports]
                self.process = silent(words, environment_of(), (theirs.fileno(),))
        return self._line

    def close(self) -> None:
        """End the process, and workers that still run. May be called repeatedly."""
        if self._line is not None:
            self._line.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the side of the nursery ------------------------------------------------------------------------------------------


def serve(line: socket.socket, imports: Sequence[str]) -> None:
    """Fork a guardian for each message until the other side is closed."""
    gc.disable()
    for name in ("autosel.workers.child", *imports):
        importlib.import_module(name)
    gc.freeze()  # imported modules stay shared with the children
    gc.enable()
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
            _be_guardian(json.loads(message), fds, line)
        pidfd = os.pidfd_open(pid)
        for fd in fds:
            os.close(fd)
        socket.send_fds(line, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _be_guardian(told: Mapping[str, Any], fds: Sequence[int], line: socket.socket) -> NoReturn:
    """Do the work of `python -I -S guardian.py CONFIG` in a worker's environment, with these descriptors open."""
    try:
        line.close()
        os.setsid()
        _take_environment(told["environment"])
        config = dict(told["config"])
        config["control_fd"], config["life_fd"] = fds
        config["argv"][-2] = str(fds[0])
        guardian.guard(config, _become_worker)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _take_environment(given: Mapping[str, str]) -> None:
    """Do what an interpreter does at its start: set variables and the module path, run sitecustomize."""
    os.environ.clear()
    os.environ.update(given)
    sys.path[:0] = [path for path in given["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    tempfile.tempdir = None
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _become_worker(_: str, argv: Sequence[str]) -> NoReturn:
    """Replace a new interpreter: `python -P -m autosel.workers.child ENTRY FD THREADS`."""
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if not os.get_inheritable(fd):
                os.close(fd)
    child = sys.modules["__main__"] = sys.modules["autosel.workers.child"]
    sys.argv = [str(child.__file__), *argv[-3:]]
    code = 0
    try:
        child.main(argv[-3], int(argv[-2]), int(argv[-1]))
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
    with socket.socket(fileno=int(sys.argv[1])) as to_the_parent:
        serve(to_the_parent, sys.argv[2:])
