"""Run one stage: its units one by one in a child process, each with a deadline, and store each result at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autosel import settings
from autosel.errors import AutoselError
from benchmarks.gpu.kept import BEGINNING, RunFolder, StageResult
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import stage
from benchmarks.gpu.summary import reason

MAIN = Path(__file__).with_name("__main__.py")
START_S = 300.0  # imports, plus the fingerprint on a new device
GUESSED_FROM = 5  # completed units before the remaining time is estimated
UNMET = {"name": "no device was met", "kind": "", "hw_id": ""}


def run_stage(
    name: str,
    scope: Scope,
    kept: RunFolder,
    wanted: Callable[[str], bool] = lambda unit: True,
    *,
    budget_s: float = 0.0,
    fresh: bool = False,
    retry: bool = False,
    unit_s: float = 0.0,
) -> StageResult:
    """Run the wanted units of a stage until they are done or its budget is spent (0: no limit).

    A unit that exceeds its deadline, or whose process dies, has failed; the next one starts in a new process. If a
    process hangs or dies before its first line, the unit BEGINNING has failed and the rest of the stage is skipped.
    Raises AutoselError if the process reports that it cannot run the stage.
    """
    started, unit_s = time.monotonic(), unit_s or stage(name).UNIT_S
    end = started + budget_s if budget_s else float("inf")
    with contextlib.closing(Child(name, scope, kept, end=end)) as child:
        first = child.begin()
        if first.get("refused"):
            raise AutoselError(f"stage {name} cannot begin", why=first["error"])
        if "error" in first:
            return _not_begun(name, scope, kept, first, round(time.monotonic() - started, 1))
        record = _resumed(name, scope, kept, first, fresh)
        record.units = {u: found for u, found in record.units.items() if found["ok"] or not retry}
        before, told = record.seconds, set[str]()
        child.coming = list(filter(wanted, record.undone))
        for done, unit in enumerate(child.coming):
            if child.left_s <= 0:
                break
            left = left_text(time.monotonic() - started, done, len(child.coming))
            _tell(f"[{name}] {len(record.units) + 1}/{len(record.listed)}  {unit}{left}")
            found = child.ask(unit, unit_s)
            if found is None:  # the budget ended; the unit did not fail
                break
            record.units[unit] = found
            _tell_once(name, found, told)
            record.seconds = round(before + time.monotonic() - started, 1)
            kept.write(record)
    kept.write(record)
    return record


def _not_begun(name: str, scope: Scope, kept: RunFolder, why: dict[str, Any], seconds: float) -> StageResult:
    """Store the failure next to earlier results; without any, in a record with the device UNMET."""
    record = kept.read(name) or _empty(name, scope, {"key": "", "device": UNMET, "listed": []})
    record.units[BEGINNING] = {"ok": False, **why, "seconds": seconds}
    kept.write(record)
    _tell(f"[{name}] failed: {why['error']}")
    return record


def _resumed(name: str, scope: Scope, kept: RunFolder, first: dict[str, Any], fresh: bool) -> StageResult:
    """Return the stored record if its key matches scope, device and software; else an empty record."""
    old = kept.read(name)
    if old is not None and old.key == first["key"] and not fresh:
        done = {unit: found for unit, found in old.units.items() if unit != BEGINNING}
        return replace(old, listed=first["listed"], units=done)
    return _empty(name, scope, first)


def _empty(name: str, scope: Scope, first: dict[str, Any]) -> StageResult:
    return StageResult(
        stage=name,
        key=first["key"],
        device=first["device"],
        scope=scope.plain,
        git_sha=git_sha(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        listed=first["listed"],
    )


class Child:
    """The stage's process, restarted whenever it has ended. `end` is the end of the budget by the monotonic clock."""

    def __init__(self, name: str, scope: Scope, kept: RunFolder, *, end: float = float("inf")) -> None:
        self.command = [sys.executable, "-P", str(MAIN), "--serve", name, "--scope", scope.text]
        self.log = kept.path(f"{name}.log")
        self.end = end
        self.process: subprocess.Popen[bytes] | None = None
        self.told = False
        self.coming: list[str] = []  # the units to be requested, in this order; each process gets the list once

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def begin(self) -> dict[str, Any]:
        """Start the process and return its first line, or `error`; `refused` is set if the process reported it."""
        limit_s = min(START_S, self.left_s)
        self._start()
        first = self.hear(limit_s)
        if first is None:
            return {"error": f"{self._ended(limit_s, 'its process did not begin within')}; see {self.log}"}
        return {**first, "refused": True} if "error" in first else first

    def ask(self, unit: str, deadline_s: float) -> dict[str, Any] | None:
        """Return the unit's result or its failure; None if the stage's budget ended first.

        The start of a new process has its own limit and does not count against the unit's deadline.
        """
        started = time.monotonic()
        if self.process is None:
            first = self.begin()
            if "error" in first:
                return self._not_done(first["error"], started)
        limit_s = min(deadline_s, self.left_s)
        if not self.told:
            at = self.coming.index(unit) if unit in self.coming else len(self.coming)
            self._say(json.dumps(self.coming[at:] or [unit]))
            self.told = True
        self._say(unit)
        found = self.hear(limit_s)
        if found is None:
            return self._not_done(self._ended(limit_s, "took longer than"), started)
        if found.pop("leaving", False):
            self.close()
        return {"seconds": round(time.monotonic() - started, 2), **found}

    def _say(self, line: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _not_done(self, why: str, started: float) -> dict[str, Any] | None:
        self.close()
        taken = round(time.monotonic() - started, 2)
        return None if self.left_s <= 0 else {"ok": False, "error": why, "seconds": taken}

    def _ended(self, limit_s: float, late: str) -> str:
        """Return the reason for the missing answer, and end the process."""
        assert self.process is not None
        running = self.process.poll() is None
        why = f"{late} {limit_s:.0f} s" if running else f"its process ended: {_ending(self.process)}"
        self.close()
        return why

    def hear(self, deadline_s: float) -> dict[str, Any] | None:
        """Return the next line; None at the deadline or if the process has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        until, line = time.monotonic() + deadline_s, b""
        descriptor = self.process.stdout.fileno()
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            more = os.read(descriptor, 1 << 16)
            if not more:
                self.process.wait()
                return None
            line += more
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self) -> None:
        self.told = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=settings.passed_to_children(),
                start_new_session=True,  # kill its compilers and sanitizers with it
            )

    def close(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self.process.wait()
        self.process = None


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def git_sha() -> str:
    """Return the commit of the checkout, with `-dirty` if it was edited; "" without git."""
    command = ["git", "-C", str(MAIN.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _tell_once(name: str, found: Mapping[str, Any], told: set[str]) -> None:
    """Print the reason of a failed unit, once for each reason."""
    if not found["ok"] and reason(found) not in told:
        told.add(reason(found))
        _tell(f"[{name}] failed: {reason(found)}")


def left_text(seconds: float, done: int, count: int) -> str:
    """Return the estimated remaining time; "" with too few completed units or under two minutes."""
    left_s = seconds / done * (count - done) if done >= GUESSED_FROM else 0.0
    minutes = round(left_s / 60)
    if minutes < 2:
        return ""
    return f"   about {minutes} min left" if minutes < 100 else f"   about {left_s / 3600:.0f} h left"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
