"""Start a worker, limit it, and remove everything that it leaves behind.

Run by path (`python -I -S guardian.py CONFIG`), standard library only, single-threaded. The guardian is the worker's
parent and lives as long as the worker, so the parent-death signal works. It is a subreaper: processes that a candidate
detaches (setsid, double fork) become its children and are killed, and no other process of autosel needs to be one. It
ends, with everything below it, when the worker ends, when told to, at a limit, or when its own parent is gone.

One SOCK_SEQPACKET socket connects it to its parent. The parent sends `kill` or `allow N`; the guardian sends
JSON: `{"pid": ...}` at the start, and the report at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38  # linux/prctl.h
TICK_S = 0.25  # interval of checking limits; a fork storm makes some hundred processes in that time
SWEEP_S = 2.0  # time that killed processes may take to disappear
HEAD_BYTES, TAIL_BYTES = 8 << 10, 32 << 10  # bytes kept of each output stream, at its start and at its end


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class OutputStream:
    """Read one output of the worker as it arrives, so that a flood neither blocks the worker nor fills memory."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.head, self.tail, self.total = b"", b"", 0

    def drain(self) -> bool:
        """Read the available bytes, at most 1 MiB at a time. Return False at the end of the stream."""
        for _ in range(16):
            try:
                data = os.read(self.read_fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.total += len(data)
            space = HEAD_BYTES - len(self.head)
            self.head += data[:space]
            self.tail = (self.tail + data[space:])[-TAIL_BYTES:]
        return True

    def text(self) -> str:
        left_out = self.total - len(self.head) - len(self.tail)
        gap = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return (self.head + gap + self.tail).decode(errors="replace")


class Guardian:
    def __init__(self, config: dict[str, Any], become: Callable[[str, list[str]], NoReturn]) -> None:
        self.config, self.become = config, become
        self.life = socket.socket(fileno=config["life_fd"])
        self.parent = os.getppid()
        self.out, self.err = OutputStream(), OutputStream()
        self.allowance = 0  # bytes of shared memory that the parent has given to the worker
        self.status: int | None = None
        self.pid = self._start()
        self.pidfd = os.pidfd_open(self.pid)

    # --- start ------------------------------------------------------------------------------------------------------

    def _start(self) -> int:
        me, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                self._become_worker(me)
            except BaseException as error:  # after fork, do not return into the guardian's code
                os.write(2, f"cannot start the worker: {error}\n".encode())
            os._exit(127)
        os.close(self.out.write_fd)
        os.close(self.err.write_fd)
        os.close(self.config["control_fd"])
        return pid

    def _become_worker(self, guardian: int) -> NoReturn:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self.out.write_fd, 1)
        os.dup2(self.err.write_fd, 2)
        os.set_inheritable(self.config["control_fd"], True)
        # otherwise a candidate could report its own end to the parent
        os.set_inheritable(self.config["life_fd"], False)
        for name, value in self.config["rlimits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)  # stays: compilers raise their own limit up to it
        stack = self.config["stack_bytes"]
        resource.setrlimit(resource.RLIMIT_STACK, (stack if hard == resource.RLIM_INFINITY else min(stack, hard), hard))
        if self.config["cpus"]:
            os.sched_setaffinity(0, self.config["cpus"])
        os.chdir(self.config["folder"])
        argv = self.config["argv"]
        self.become(argv[0], argv)

    # --- watch ------------------------------------------------------------------------------------------------------

    def watch(self) -> str:
        """Wait for a reason to end everything and return it ("" if the worker ended normally)."""
        poll = select.poll()
        streams = {self.out.read_fd: self.out, self.err.read_fd: self.err}
        for fd in (self.pidfd, self.life.fileno(), *streams):
            poll.register(fd, select.POLLIN)
        next_tick = time.monotonic() + TICK_S
        while True:
            for fd, _ in poll.poll(max(0.0, next_tick - time.monotonic()) * 1000):
                if fd in streams and not streams[fd].drain():
                    poll.unregister(fd)
                elif fd == self.life.fileno() and not self._obey():
                    return "killed"
                elif fd == self.pidfd:
                    return ""
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                reason = "killed" if os.getppid() != self.parent else self._over_limits()
                if reason:
                    return reason

    def _obey(self) -> bool:
        """Handle one message from the parent. Return False if the worker must end."""
        try:
            command = self.life.recv(256)
        except OSError:
            return False
        if not command.startswith(b"allow "):
            return False
        self.allowance += int(command[6:])
        return True

    def _over_limits(self) -> str:
        self.reap()
        pids = descendants()
        if len(pids) > self.config["processes"]:
            return "processes"
        pages = threads = 0
        for pid in pids:
            stat = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            if stat:
                threads += int(stat[17])  # field 20, num_threads
                pages += int(stat[21])  # field 24, rss in pages
        if threads > self.config["threads"]:
            return "processes"
        limit = self.config["memory_bytes"] + self.allowance
        return "memory" if pages * resource.getpagesize() > limit else ""

    # --- end --------------------------------------------------------------------------------------------------------

    def end(self, why: str) -> dict[str, Any]:
        """Kill the worker's group and its escaped processes. Return the report."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # before it is reaped, while the group's number is still reserved
        escaped, left = self._sweep()
        self.out.drain(), self.err.drain()
        shutil.rmtree(self.config["folder"], ignore_errors=True)
        status = self.status
        ended = status is not None
        return {
            "exit_code": os.WEXITSTATUS(status) if ended and os.WIFEXITED(status) else None,  # type: ignore[arg-type]
            "signal": os.WTERMSIG(status) if ended and os.WIFSIGNALED(status) else None,  # type: ignore[arg-type]
            "why": why,
            "stdout": self.out.text(),
            "stderr": self.err.text(),
            "escaped": escaped,
            "left": left,
        }

    def _sweep(self) -> tuple[int, int]:
        """Return (processes found outside the group, processes that could not be killed)."""
        deadline = time.monotonic() + SWEEP_S
        seen: set[int] = set()
        while True:
            self.reap()
            pids = descendants()
            if not pids or time.monotonic() > deadline:
                return len(seen), len(pids)
            for pid in pids:
                if pid != self.pid:
                    seen.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            self.life.send(json.dumps(message).encode())

    def linger(self) -> None:
        """Wait until the other end is closed: closing first, with a message unread, would destroy the report."""
        with contextlib.suppress(OSError):
            while self.life.recv(256):
                pass


def descendants() -> list[int]:
    """Return all processes below this one."""
    found, todo = [], [os.getpid()]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return found


def children_of(pid: int) -> list[int]:
    if not Path("/proc/thread-self/children").exists():  # a kernel without CONFIG_PROC_CHILDREN
        return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _parent_of(p.name) == pid]
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(child) for task in tasks for child in read(task / "children").split()]


def _parent_of(pid: str) -> int:
    stat = read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(stat[1]) if stat else 0


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def guard(config: dict[str, Any], become: Callable[[str, list[str]], NoReturn]) -> None:
    """Start the worker, watch it, and end it. `become` makes its process the interpreter of a command line."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guardian = Guardian(config, become)
    guardian.say({"pid": guardian.pid})
    guardian.say(guardian.end(guardian.watch()))
    guardian.linger()


if __name__ == "__main__":
    guard(json.loads(sys.argv[1]), os.execv)
