"""Control a worker from the parent: start it, send requests, limit it, and report how it ended.

    with Worker("autosel.parity.child:serve") as worker:
        reply = worker.request({"do": "call", ...}, deadline_s=10)

A worker is a new interpreter, or a fork of a process that has imported torch (nursery.py), below a guardian
(guardian.py), in its own session, with an allow-listed environment and a private folder. Its code may crash, hang,
fork, flood its output or send half a reply. `request` returns the complete reply by the deadline; otherwise it raises
WorkerError with the cause, and nothing of the worker is left. A worker that does not start has not run any candidate's
code yet: that raises EnvironmentFault.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autosel import settings
from autosel.errors import AutoselError, WorkerError
from autosel.values import from_json, parse_json
from autosel.workers import protocol
from autosel.workers.arena import Arena
from autosel.workers.environment import start_fault

if TYPE_CHECKING:
    from autosel.workers.nursery import Forked, Nursery

T = TypeVar("T")
START_S = 120.0  # importing torch from a cold, slow disk
END_S = 10.0  # the guardian sweeps for 2 s at most; after this it has failed
# Linux's default. NVRTC 13 makes it unlimited for its process and all that it starts: an endless recursion would then
# fill the memory until the deadline.
STACK_BYTES = 8 << 20
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "memoryerror")
BUSY = ("device or resource busy", "resource temporarily unavailable", "device is busy")
# CUDA's messages for a device or driver that no process could use: exclusive mode, a lost device, a driver older than
# the toolkit, a switch that is not ready, failed memory.
UNUSABLE = (
    "busy or unavailable", "no cuda-capable device", "driver version is insufficient", "system not yet initialized",
    "uncorrectable ecc error",
)  # fmt: skip
NOBODYS_FAULT = (*OUT_OF_MEMORY, *BUSY, *UNUSABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limit a worker. `memory_bytes` bounds its private memory (0: half of the machine's)."""

    memory_bytes: int = 0
    processes: int = 64
    threads: int = 1024
    files: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Describe how a worker ended. `why`: "" normally, "killed" by the parent, "memory" or "processes" at a limit.

    `escaped` counts processes that it had detached from its group, `left` those that could not be killed.
    """

    exit_code: int | None
    signal: int | None
    why: str
    stdout: str
    stderr: str
    escaped: int
    left: int

    @property
    def cause(self) -> str:
        if self.why in ("memory", "processes"):
            return self.why
        if self.signal is not None:
            known = self.signal in set(signal.Signals)  # most real-time signals have no name
            return signal.Signals(self.signal).name if known else f"signal {self.signal}"
        return "unknown" if self.exit_code is None else f"exit {self.exit_code}"

    @property
    def retryable(self) -> bool:
        """Return True if the candidate may not be at fault: memory ran out, or the kernel's out-of-memory killer
        struck."""
        killed_by_other = self.signal == signal.SIGKILL and self.why == ""
        return self.why == "memory" or killed_by_other or _names(self.stderr, NOBODYS_FAULT)


class RaisedError(WorkerError):
    """Raised if the worker works but its entry raised an exception; `kind` is the exception's type."""

    def __init__(self, what: str, *, kind: str, message: str, traceback: str) -> None:
        retryable = _names(f"{kind} {message}", NOBODYS_FAULT)
        super().__init__(what, cause=f"raised {kind}", why=f"{kind}: {message}", retryable=retryable)
        self.kind, self.message, self.traceback = kind, message, traceback


class Worker:
    """Run `entry` ("module:function") in a child process. It starts at once; a request waits for its imports."""

    def __init__(
        self,
        entry: str,
        *,
        limits: Limits | None = None,
        cpus: Sequence[int] = (),
        threads: int = 0,
        start_deadline_s: float = START_S,
        nursery: Nursery | None = None,
    ) -> None:
        """`cpus`: affinity; `threads`: torch's number of threads, 0 for its default; `nursery`: the process that forks
        it, instead of a new interpreter.

        Raises EnvironmentFault if no process can be created.
        """
        self.entry, self.exit, self._cause = entry, None, ""
        self._ready, self._next_id = False, 1
        self._start_until = time.monotonic() + start_deadline_s
        try:
            self._spawn(_config(limits or Limits(), cpus), threads, nursery)
        except OSError as error:  # no room for its folder, no descriptor or process left, no interpreter
            raise start_fault(entry, AutoselError(f"it cannot be created: {error}")) from error
        self.pid = self._first_word()

    def _spawn(self, config: Mapping[str, Any], threads: int, nursery: Nursery | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="autosel-worker-"))
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._control, control = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
            self._life, life = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            child = ["-m", "autosel.workers.child", self.entry, str(control.fileno()), str(threads)]
            places = {"folder": str(self.folder), "control_fd": control.fileno(), "life_fd": life.fileno()}
            told = {**config, **places, "argv": [sys.executable, "-P", *child]}
            environment = environment_of() | {"TMPDIR": str(self.folder)}
            start = start_guardian if nursery is None else nursery.start_guardian
            self._guardian: Forked | subprocess.Popen[bytes] = start(
                told, environment, (control.fileno(), life.fileno())
            )
            undo.pop_all()
            control.close()
            life.close()

    exit: Exit | None
    _guardian: Forked | subprocess.Popen[bytes]

    # --- asking -----------------------------------------------------------------------------------------------------

    def request(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Return the entry's complete reply within `deadline_s` (start-up not counted).

        Raises RaisedError if the entry raised. Otherwise, without a reply, the worker is gone: raises WorkerError with
        the cause, or EnvironmentFault if the worker did not start. Raises ValueError for a request that is not JSON.
        """
        return self._ask({"request": dict(request)}, deadline_s, stage="request")

    def told(self, kind: type[T], request: Mapping[str, Any], deadline_s: float) -> T:
        """Convert the reply to a value of `kind`, because a worker may send anything. Raises as `request` does; an
        invalid value ends the worker."""
        reply = self.request(request, deadline_s)
        try:
            found: T = from_json(kind, reply)
        except ValueError as error:
            raise self._babbled(str(request.get("do", "request")), str(error)[:200]) from None
        return found

    def attach(self, arena: Arena) -> None:
        """Share an arena with the worker; later requests may contain references into it."""
        self._tell_guardian(f"allow {arena.touched_bytes}")
        self._ask({"attach": [[arena.name, arena.size_bytes]]}, 10.0, stage="attach", fds=(arena.fd,))

    def detach(self, arena: Arena) -> None:
        """Remove an arena from the worker."""
        self._ask({"detach": arena.name}, 10.0, stage="detach")

    def wait_ready(self) -> None:
        """Wait until the entry is imported (`request` does this automatically). Raises EnvironmentFault if the worker
        does not start, before any candidate is loaded; the worker is then gone."""
        if self._ready:
            return
        try:
            self._reply_to(0, self._start_until, stage="start")
        except WorkerError as error:
            self.close()
            raise start_fault(self.entry, error) from error
        self._ready = True

    def _ask(
        self, message: dict[str, Any], deadline_s: float, *, stage: str, fds: Sequence[int] = ()
    ) -> dict[str, Any]:
        if self.exit is not None:
            raise self._error("the worker has ended", self._cause or "closed", self.exit.retryable)
        number = self._next_id
        frame = protocol.encode({"id": number, **message})
        try:
            self.wait_ready()
            self._next_id += 1
            until = time.monotonic() + deadline_s
            try:
                protocol.send(self._control, frame, fds, until=until)
            except protocol.ClosedError:
                raise self._died(stage) from None
            except protocol.LateError:
                raise self._late(stage) from None
            return self._reply_to(number, until, stage=stage)
        except RaisedError:
            raise
        except BaseException:  # also for Ctrl-C: nothing of the worker may survive
            self.close()
            raise

    def _reply_to(self, number: int, until: float, *, stage: str) -> dict[str, Any]:
        try:
            reply, fds = protocol.receive(self._control, until=until)
        except protocol.ClosedError:
            raise self._died(stage) from None
        except protocol.LateError:
            raise self._late(stage) from None
        except protocol.ProtocolError as error:
            raise self._babbled(stage, str(error)) from None
        for fd in fds:
            os.close(fd)
        one = isinstance(reply.get("ok"), dict) != isinstance(reply.get("error"), dict)
        if type(reply.get("id")) is not int or reply["id"] != number or not one:
            raise self._babbled(stage, f"no reply to message {number}: {str(reply)[:200]}")
        if isinstance(reply.get("error"), dict):
            kind, message, lines = (str(reply["error"].get(k, "")) for k in ("type", "message", "traceback"))
            raise RaisedError(f"{self.entry} raised {kind}", kind=kind, message=message, traceback=lines)
        found: dict[str, Any] = reply["ok"]
        return found

    # --- ending -----------------------------------------------------------------------------------------------------

    def close(self) -> Exit:
        """Kill the worker and everything that it started; return how it ended. May be called repeatedly."""
        if self.exit is None:
            self._await_report()
        assert self.exit is not None
        return self.exit

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_guardian", None) is not None and self.exit is None:
            with contextlib.suppress(Exception):  # at interpreter shutdown the guardian notices without a message
                self.close()

    def _died(self, stage: str) -> WorkerError:
        """Handle a closed control line: the worker is dead or dying, unless it only closed the line."""
        if self.exit is None:
            self._await_report(grace_s=0.5)
        assert self.exit is not None
        cause = "hung up" if self.exit.why == "killed" else self.exit.cause
        return self._error(f"the worker ended during {stage}: {cause}", cause, self.exit.retryable)

    def _late(self, stage: str) -> WorkerError:
        self.close()
        return self._error(f"no reply by the deadline ({stage})", f"timeout in {stage}", False)

    def _babbled(self, stage: str, why: str) -> WorkerError:
        self.close()
        return self._error(f"the worker sent an invalid reply ({stage}): {why}", "protocol", False)

    def _error(self, what: str, cause: str, retryable: bool) -> WorkerError:
        assert self.exit is not None
        self._cause = cause
        return WorkerError(what, cause=cause, why=self.exit.stderr.strip()[-2000:], retryable=retryable)

    # --- the guardian -----------------------------------------------------------------------------------------------

    def _first_word(self) -> int:
        said = self._hear(START_S)
        if said is None or "pid" not in said:
            self._take_report(said)
            raise start_fault(self.entry, AutoselError("its guardian ended at once"))
        return int(said["pid"])

    def _await_report(self, grace_s: float = 0.0) -> None:
        """Wait for the guardian's report; after `grace_s` without one, tell it to kill."""
        said = self._hear(grace_s) if grace_s else None
        if said is None:
            self._tell_guardian("kill")
            said = self._hear(END_S)
        self._take_report(said)

    def _take_report(self, said: dict[str, Any] | None) -> None:
        if said is not None and "exit_code" in said:
            self.exit = from_json(Exit, said)
        else:  # the guardian itself was killed; the worker has asked the kernel to die with it
            self.exit = Exit(exit_code=None, signal=None, why="", stdout="", stderr="", escaped=0, left=0)
        self._guardian.kill()
        self._guardian.wait()
        self._life.close()
        self._control.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell_guardian(self, command: str) -> None:
        with contextlib.suppress(OSError):  # it has ended, and its report is waiting
            self._life.send(command.encode(), socket.MSG_NOSIGNAL)

    def _hear(self, patience_s: float) -> dict[str, Any] | None:
        """Return the guardian's next message, or None if none comes or the guardian is gone."""
        poll = select.poll()
        poll.register(self._life, select.POLLIN)
        if not poll.poll(patience_s * 1000):
            return None
        try:
            data = self._life.recv(1 << 20)
        except OSError:
            return None
        return parse_json(data, what="guardian") if data else None


def start_guardian(
    config: Mapping[str, Any], environment: Mapping[str, str], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start guardian.py in a new session, with these descriptors open."""
    guardian = Path(__file__).with_name("guardian.py")
    return silent(["-I", "-S", str(guardian), json.dumps(config)], environment, fds)


def silent(words: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start an interpreter in a new session, with these descriptors open and no other input or output."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=fds,
        start_new_session=True,
    )


def _config(limits: Limits, cpus: Sequence[int]) -> dict[str, Any]:
    memory = limits.memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return {
        "cpus": list(cpus),
        "memory_bytes": memory,
        "processes": limits.processes,
        "threads": limits.threads,
        "stack_bytes": STACK_BYTES,
        # DATA counts private writable memory, unlike AS, which counts what CUDA and allocators only reserve.
        "rlimits": {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": limits.files, "RLIMIT_DATA": memory},
    }


def environment_of() -> dict[str, str]:
    """Return a worker's environment, with this package first on its path."""
    environment = settings.passed_to_workers()
    package = str(Path(__file__).resolve().parents[2])
    inherited = [str(Path(p).absolute()) for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    environment["PYTHONPATH"] = os.pathsep.join([package, *inherited])
    return environment


def _names(text: str, words: Sequence[str]) -> bool:
    text = text.lower()
    return any(word in text for word in words)
