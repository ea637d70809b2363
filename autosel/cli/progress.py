"""The line that moves, on stderr: stage, candidate, pairs so far, elapsed, ETA. Never minutes of silence.

On a terminal one line is rewritten, also while nothing is reported; into a file or a pipe goes a line for each stage
and each decision, and one now and then that says what is under way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import click

from autosel import settings
from autosel.cli.figures import against_baseline, shape
from autosel.cli.output import WIDTH, paragraph
from autosel.race.plan import SESSIONS
from autosel.tuning.job import Rejection
from autosel.values import Decision

# Share of a cold tune that each stage takes, measured on two cores (docs/figures.md): only the ETA depends on it.
WEIGHTS = {"fingerprint": 0.03, "parity": 0.32, "screening": 0.25, "confirming": 0.40}
KNOWN_FROM = 0.1  # share of the work below which an ETA would be a guess
BEAT_S = 0.5
QUIET_S = 15.0  # into a pipe, the longest silence


class Progress:
    """A listener of tuning that writes to stderr while it is entered (`with`)."""

    def __init__(self, budget_s: float = 0.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.budget_s = clock, budget_s
        self.started = self.said_at = clock()
        self.live = sys.stderr.isatty() and settings.colour() is None
        self.now = ("", "", 0, 0)  # stage, detail, done, total
        self.decided_now = self.settled = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._run, name="autosel-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._pulse.join()
        self._say("")

    # --- told by tuning ---------------------------------------------------------------------------------------------

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        fresh = name != self.now[0]
        self.now = (name, detail, done, total)
        if fresh and not self.live:
            self._say(f"{self._elapsed():>7}  {name} ...")

    def decided(self, decision: Decision, settled_before: bool) -> None:
        if settled_before:
            self.settled += 1
            return
        self.decided_now += 1
        if not self.live:
            what = f"{decision.op} {shape(decision.workload)}: {decision.state} {decision.arm.candidate}"
            self._say(f"{self._elapsed():>7}  {what}, {click.unstyle(against_baseline(decision))}")

    def rejected(self, rejection: Rejection) -> None:
        if rejection.stage in ("parity", "race", "build"):
            w = rejection.workload
            text = f"rejected ({rejection.stage}): {rejection.candidate} at {w.op} {shape(w)}: {rejection.reason}"
            self._say(paragraph(text, hang="  "))

    # --- said to people ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            self.beat()

    def beat(self) -> None:
        """Redraw the moving line; into a pipe, break a silence that has lasted."""
        if self.live:
            self._write(f"\r\x1b[2K{self.line()}")
        elif self.clock() - self.said_at >= QUIET_S:
            self._say(f"{self._elapsed():>7}  {self._under_way()}{self._left()}")

    def line(self) -> str:
        """The moving line: what is under way, cut to fit, and the time."""
        tail = f"  {self._elapsed()}{self._left()}"
        width = WIDTH - 1 - len(tail)
        return f"{self._under_way()[:width]:<{width}}{tail}"

    def _under_way(self) -> str:
        name, detail, done, total = self.now
        return " ".join(part for part in (name, f"{done}/{total} " if total > 1 else "", detail) if part)

    def _say(self, text: str) -> None:
        """A line that stays, in place of the moving one."""
        self.said_at = self.clock()
        if text or self.live:
            self._write(("\r\x1b[2K" if self.live else "") + (f"{text}\n" if text else ""))

    def _write(self, text: str) -> None:
        """A reader who goes away loses the progress, and does not end the work."""
        with self._lock:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except (OSError, ValueError):
                self._over.set()

    def _left(self) -> str:
        """Time left by the stages' usual shares; a budget bounds it."""
        name, _, done, total = self.now
        known = next((k for k in WEIGHTS if name.startswith(k)), "")
        if not known:
            return ""
        before = sum(WEIGHTS[k] for k in list(WEIGHTS)[: list(WEIGHTS).index(known)])
        within = done / total if total else 0.0
        if known == "confirming":  # three sessions, each of which takes every race
            within = (int(name.split()[-1]) - 1 + within) / SESSIONS
        share, elapsed = before + WEIGHTS[known] * within, self.clock() - self.started
        if share < KNOWN_FROM:
            return ""
        left = elapsed * (1 - share) / share
        if self.budget_s:
            left = min(left, max(0.0, self.budget_s - elapsed))
        return f", about {_clock(left)} left"

    def _elapsed(self) -> str:
        of = f" of {_clock(self.budget_s)}" if self.budget_s else ""
        return _clock(self.clock() - self.started) + of


class Stages(Protocol):
    """Who wants to know how it goes."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...


class Within:
    """A listener for one run of many: what that run is at is a detail of it."""

    def __init__(self, listener: Stages, title: str) -> None:
        self.listener, self.title = listener, title

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        count = f"{done}/{total}" if total > 1 else ""
        self.listener.stage(self.title, " ".join(part for part in (name, count, detail) if part), 0, 1)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
