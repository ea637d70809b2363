"""The line that moves, on stderr: stage, candidate, pairs so far, elapsed, ETA. Never minutes of silence.

On a terminal one line is rewritten; into a file or a pipe, one line a stage and a decision.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from autosel.pipeline import Rejection
from autosel.values import Decision

# Share of a cold tune that each stage takes, measured on two cores (docs/figures.md): only the ETA depends on it.
WEIGHTS = {"fingerprint": 0.03, "build": 0.15, "parity": 0.22, "screening": 0.24, "confirming": 0.36}
REFRESH_S = 0.1


class Progress:
    """A `pipeline.Listener` that writes to stderr."""

    def __init__(self, budget_s: float = 0.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.budget_s = clock, budget_s
        self.started = clock()
        self.live = sys.stderr.isatty()
        self.shown_at = 0.0
        self.last_stage = ""
        self.decided_now = 0
        self.settled = 0

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        """Show where we are; at most ten times a second on a terminal, once a stage elsewhere."""
        now = self.clock()
        if not self.live:
            if name != self.last_stage:
                click.echo(f"{self._elapsed():>7}  {name} ...", err=True)
        elif now - self.shown_at >= REFRESH_S or name != self.last_stage:
            self.shown_at = now
            self._show(name, detail, done, total)
        self.last_stage = name

    def decided(self, decision: Decision, settled_before: bool) -> None:
        if settled_before:
            self.settled += 1
            return
        self.decided_now += 1
        if not self.live:
            click.echo(
                f"{self._elapsed():>7}  {decision.workload.key}: {decision.state} {decision.arm.candidate}", err=True
            )

    def rejected(self, rejection: Rejection) -> None:
        if rejection.stage in ("parity", "race", "build"):
            self.clear()
            text = f"rejected ({rejection.stage}) {rejection.candidate} at {rejection.workload.key}: {rejection.reason}"
            click.echo(text, err=True)

    def clear(self) -> None:
        """Take the moving line away, so that other output starts clean."""
        if self.live:
            click.echo("\r\x1b[2K", nl=False, err=True)

    def _show(self, name: str, detail: str, done: int, total: int) -> None:
        count = f"{done}/{total} " if total > 1 else ""
        left = self._left(name, done, total)
        line = f"{name} {count} {detail}"
        tail = f"  {self._elapsed()}{left}"
        width = 79 - len(tail)
        click.echo(f"\r\x1b[2K{line[:width]:<{width}}{tail}", nl=False, err=True)

    def _left(self, name: str, done: int, total: int) -> str:
        """Time left by the stages' usual shares; a budget bounds it."""
        known = next((k for k in WEIGHTS if name.startswith(k)), "")
        if not known:
            return ""
        order = list(WEIGHTS)
        before = sum(WEIGHTS[k] for k in order[: order.index(known)])
        within = WEIGHTS[known] * (done / total if total else 0.0)
        share = before + within
        elapsed = self.clock() - self.started
        if share < 0.02 or elapsed < 2:
            return ""
        left = elapsed * (1 - share) / share
        if self.budget_s:
            left = min(left, max(0.0, self.budget_s - elapsed))
        return f", about {_clock(left)} left"

    def _elapsed(self) -> str:
        of = f" of {_clock(self.budget_s)}" if self.budget_s else ""
        return _clock(self.clock() - self.started) + of


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
