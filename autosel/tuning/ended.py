"""Errors of a tune that ends early (Ctrl-C) or leaves workloads undecided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from autosel.errors import Stopped, TooNoisy
from autosel.ledger.describe import shape
from autosel.race import realtime
from autosel.race.session import BUSY
from autosel.tuning.job import Rejection, Report, TuneListener
from autosel.values import Decision

TUNE = " tune --"  # in the command that has the option --realtime


class Counted:
    """A listener that counts decisions and forwards all events."""

    def __init__(self, listener: TuneListener) -> None:
        self.listener, self.done = listener, 0

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        self.listener.stage(name, detail, done, total)

    def decided(self, decision: Decision, settled_before: bool) -> None:
        self.done += 1
        self.listener.decided(decision, settled_before)

    def rejected(self, rejection: Rejection) -> None:
        self.listener.rejected(rejection)


@contextmanager
def stoppable(listener: TuneListener, workloads: int, again: str) -> Iterator[Counted]:
    """Turn Ctrl-C into Stopped, with the number of stored decisions and the command `again` that continues."""
    counted = Counted(listener)
    try:
        yield counted
    except KeyboardInterrupt:
        what = f"stopped; {counted.done} of {workloads} decided and stored; continue with `{again}`"
        raise Stopped(what) from None


def unfinished(found: Report, again: str) -> TooNoisy | None:
    """Return an error with the undecided workloads, the reasons and the command `again`; None if all are decided.

    It says what its exit code means: the other decisions are stored, and nothing has failed.
    """
    if not found.undecided:
        return None
    decided = {d.workload.key: d.reason for d in found.decisions}
    by_reason: dict[str, list[str]] = {}
    for key, n in {n.workload.key: n for n in found.undecided}.items():
        reason = decided.get(key, "the budget ended before the race")
        by_reason.setdefault(reason, []).append(f"{n.label} {shape(n.workload)}")
    left, total = sum(map(len, by_reason.values())), len(found.labels)
    means = f"exit code {TooNoisy.exit_code} means undecided, not failed: {_rest(total - left)}"
    return TooNoisy(
        f"{left} of {total} workloads; earlier decisions still serve",
        why="\n".join([*(f"{_few(names)}: {reason}" for reason, names in by_reason.items()), means]),
        todo="\n".join([f"continue:  {again}", *_if_busy(by_reason, again)]),
    )


def _rest(decided: int) -> str:
    if not decided:
        return "no workload is decided"
    return f"the other {f'{decided} are' if decided > 1 else 'one is'} decided and stored"


def _if_busy(reasons: Iterable[str], again: str) -> list[str]:
    if not any(reason.startswith(BUSY) for reason in reasons):
        return []
    quiet = [] if "--wait" in again else [f"once the machine is quiet:  {again} --wait"]
    urged = TUNE in again and "--realtime" not in again and realtime.allowed()
    return [*quiet, *([f"now, with samples at real-time priority:  {again} --realtime"] if urged else [])]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"
