"""Progress on stderr: stage, candidate, pairs so far, elapsed time, ETA.

A terminal shows one line, which is redrawn every 0.5 s. A file or a pipe gets a line for each stage and each decision,
and one for the current stage after 15 s of silence.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import click

from autosel import settings
from autosel.cli.figures import against_baseline
from autosel.cli.output import WIDTH, paragraph
from autosel.ledger.describe import contended, shape
from autosel.race.plan import SESSIONS
from autosel.tuning.underway import RunningCommand, Underway, now
from autosel.values import Decision

if TYPE_CHECKING:
    from autosel.tuning.job import Rejection

# Share of each stage in a cold tune, measured on two cores (docs/figures.md). Only the ETA depends on it.
WEIGHTS = {"fingerprint": 0.03, "parity": 0.32, "screening": 0.25, "confirming": 0.40}
KNOWN_FROM = 0.1  # finished share of the work from which an ETA is shown
BEAT_S = 0.5
QUIET_S = 15.0  # longest silence in a pipe


class Progress:
    """Listener of tuning that writes to stderr inside its `with` block."""

    def __init__(
        self, budget_s: float = 0.0, *, command: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self.budget_s = clock, budget_s
        self.seen = Underway(settings.home())
        self.command = RunningCommand(command=command or _command(), pid=os.getpid(), started_at=now())
        self.started = self.said_at = clock()
        self.live = sys.stderr.isatty() and settings.colour() is None
        self.now = ("", "", 0, 0)  # stage, detail, done, total
        self.of = ""  # the name of the run, if there are several
        self.eta: Eta | None = None
        self.estimate: tuple[float, float] | None = None  # seconds left, and when that was estimated
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
        self.seen.close()
        self._say("")

    # --- called by tuning ------------------------------------------------------------------------------------------

    def expect(self, foreseen: Mapping[Stage, float]) -> None:
        """Set the coming stages in order, with their expected seconds. From now on there is an ETA."""
        self.eta = Eta(foreseen, self.clock)

    def stage(self, name: str, detail: str, done: int, total: int, of: str = "") -> None:
        """Start or update a stage. `of` names the run if there are several."""
        fresh = of != self.of if of else name != self.now[0]
        moved = fresh or (done, total) != self.now[2:]
        self.now, self.of = (name, detail, done, total), of
        if moved:
            self.estimate = self._estimated()
        if self.eta is not None:
            self.eta.enter((of, name))
        if fresh and not self.live:
            self._say(f"{self._elapsed():>7}  {of or name} ...{self._left()}")

    def decided(self, decision: Decision, settled_before: bool) -> None:
        if settled_before:
            self.settled += 1
            return
        self.decided_now += 1
        if not self.live:
            what = f"{decision.op} {shape(decision.workload)}: {decision.state} {decision.arm.candidate}"
            found = "; ".join(filter(None, (click.unstyle(against_baseline(decision)), contended(decision))))
            self._say(paragraph(f"{self._elapsed():>7}  {what}, {found}", hang=" " * 11))

    def rejected(self, rejection: Rejection) -> None:
        if rejection.stage in ("parity", "race", "build"):
            w = rejection.workload
            text = f"rejected ({rejection.stage}): {rejection.candidate} at {w.op} {shape(w)}: {rejection.reason}"
            self._say(paragraph(text, hang="  "))

    def note(self, text: str) -> None:
        """Print a line that the user should see at once."""
        click.echo(paragraph(text, hang="  "), err=True)

    # --- written to stderr -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            self.beat()
            self.show()

    def show(self) -> None:
        """Show the stage to the daemon of this home, if there is one."""
        name, detail, done, total = self.now
        seconds, decided = self._left_s(), self.decided_now + self.settled
        left_s = -1.0 if seconds is None else float(round(seconds))
        stage = " ".join(filter(None, (self.of, name)))
        at = replace(self.command, stage=stage, detail=detail, done=done, total=total, decided=decided, left_s=left_s)
        self.seen.show(at)

    def beat(self) -> None:
        """Redraw the progress line; in a pipe, print one after a long silence."""
        if self.live:
            self._write(f"\r\x1b[2K{self.line()}")
        elif self.clock() - self.said_at >= QUIET_S:
            self._say(f"{self._elapsed():>7}  {self._under_way()}{self._left()}")

    def line(self) -> str:
        """Return the progress line: the current stage, cut to fit, and the time."""
        tail = f"  {self._elapsed()}{self._left()}"
        width = WIDTH - 1 - len(tail)
        return f"{self._under_way()[:width]:<{width}}{tail}"

    def _under_way(self) -> str:
        name, detail, done, total = self.now
        space = "" if self.of else " "
        return " ".join(part for part in (self.of, name, f"{done}/{total}{space}" if total > 1 else "", detail) if part)

    def _say(self, text: str) -> None:
        """Print a permanent line instead of the progress line."""
        self.said_at = self.clock()
        if text or self.live:
            self._write(("\r\x1b[2K" if self.live else "") + (f"{text}\n" if text else ""))

    def _write(self, text: str) -> None:
        """Write to stderr. If its reader is gone, progress ends, but not the work."""
        with self._lock:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except (OSError, ValueError):
                self._over.set()

    def _left(self) -> str:
        seconds = self._left_s()
        return "" if seconds is None else f", about {_clock(seconds)} left"

    def _left_s(self) -> float | None:
        """Return the time left, from the expected times, else from the stages' usual shares; a budget limits it.

        It falls while nothing finishes, and never below a quarter of the last estimate.
        """
        _, _, done, total = self.now
        if self.eta is not None:
            return self.eta.left_s(done, total)
        if self.estimate is None:
            return None
        seconds, since = self.estimate
        left = max(seconds - (self.clock() - since), seconds / 4)
        return min(left, max(0.0, self.budget_s - (self.clock() - self.started))) if self.budget_s else left

    def _estimated(self) -> tuple[float, float] | None:
        """Return the seconds left by the finished share of the work, and now; None if too little is finished."""
        name, _, done, total = self.now
        known = next((k for k in WEIGHTS if name.startswith(k)), "")
        if not known:
            return None
        before = sum(WEIGHTS[k] for k in list(WEIGHTS)[: list(WEIGHTS).index(known)])
        within = done / total if total else 0.0
        if known == "confirming":  # three sessions, each with every race
            within = (int(name.split()[-1]) - 1 + within) / SESSIONS
        share, now = before + WEIGHTS[known] * within, self.clock()
        return ((now - self.started) * (1 - share) / share, now) if share >= KNOWN_FROM else None

    def _elapsed(self) -> str:
        of = f" of {_clock(self.budget_s)}" if self.budget_s else ""
        return _clock(self.clock() - self.started) + of


Stage = tuple[str, str]  # the run ("" if there is only one), and the stage's name
DOUBT = 0.05  # finished share of the work at which the measured pace has the same weight as the expected times


class Eta:
    """Time left of the expected stages, corrected by the time that finished stages took.

    An expected stage that is skipped costs nothing. An unexpected stage does not change the estimate.
    """

    def __init__(self, foreseen: Mapping[Stage, float], clock: Callable[[], float]) -> None:
        self.foreseen, self.clock = dict(foreseen), clock
        self.order = {stage: i for i, stage in enumerate(self.foreseen)}
        self.spent: dict[Stage, float] = {}
        self.at = -1  # index of the furthest stage entered
        self.now: Stage | None = None  # the current stage, if it was expected
        self.since = clock()

    def enter(self, stage: Stage) -> None:
        if stage == self.now:
            return
        if self.now is not None:
            self.spent[self.now] = self.clock() - self.since
        self.now, self.since = (stage if stage in self.foreseen else None), self.clock()
        self.at = max(self.at, self.order.get(stage, -1))

    def left_s(self, done: int, total: int) -> float:
        """Return the seconds left; `done` of `total` parts of the current stage are finished."""
        left = sum(s for stage, s in self.foreseen.items() if self.order[stage] > self.at)
        known, took = sum(self.foreseen[s] for s in self.spent), sum(self.spent.values())
        if self.now is not None:
            own, elapsed = self.foreseen[self.now], self.clock() - self.since
            by_time = elapsed / own if own else 1.0
            share = max(done / total, min((done + 0.95) / total, by_time)) if total else by_time
            known, took, left = known + share * own, took + elapsed, left + (1 - min(1.0, share)) * own
        doubt = DOUBT * sum(self.foreseen.values())
        return left * (took + doubt) / (known + doubt) if doubt else 0.0


def _command() -> str:
    """Return the verb that runs, with its model."""
    ctx = click.get_current_context(silent=True)
    return " ".join(filter(None, (ctx.command_path, str(ctx.params.get("model") or "")))) if ctx else "autosel"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
