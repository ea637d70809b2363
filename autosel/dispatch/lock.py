"""Pin decisions by digest in a lock file, which has the snapshot's format: `best()` then serves only those.

AUTOSEL_LOCK=autosel.lock serves from it. AUTOSEL_FROZEN=1 refuses to start if a decision that it pins for this device
cannot be served as pinned, instead of falling back to the baseline. A fault in service still demotes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autosel.candidates.validity import staleness
from autosel.errors import AutoselError, ForeignDecision
from autosel.guard import Held
from autosel.ledger.key import matters
from autosel.ledger.snapshot import Row
from autosel.values import SERVING

FILE = "autosel.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkept:
    """Name a pinned decision that cannot serve here as pinned."""

    key: str
    reason: str


def pinned_here(rows: Iterable[Row], hw_id: str, mode: str, kind: str = "cpu") -> tuple[Row, ...]:
    """Return the rows pinned for this device, its kind, and the mode of this process."""

    def counts(row: Row) -> bool:
        bucket = str(row.document.get("bucket"))
        return matters(str(row.document.get("mode")), kind, bucket) == matters(mode, kind, bucket)

    return tuple(r for r in rows if r.document.get("hw_id") == hw_id and counts(r))


def unkept(rows: Sequence[Row], held: Held) -> tuple[Unkept, ...]:
    """Return the pinned rows that would not be served, and why."""
    found = []
    for row in rows:
        try:
            d = row.decision
            why = "" if d.state in SERVING else f"it is {d.state}"
            why = why or held.why(d) or staleness(d)
        except AutoselError as error:
            why = str(error).replace("\n", ": ")
        if why:
            found.append(Unkept(key=row.key, reason=why))
    return tuple(found)


def refusal(path: Path, pinned: int, problems: Sequence[Unkept], mode: str) -> ForeignDecision | None:
    """Return the error for a lock that does not fit this device; None if it fits."""
    if not path.is_file():
        return ForeignDecision(
            f"there is no {path}", why="a frozen program serves only what it pins", todo="autosel export --lock"
        )
    if not pinned:
        return ForeignDecision(
            f"{path} pins nothing for this device",
            why=f"this process runs {mode}; a lock holds for the device and the thread count it was made with",
            todo="autosel export --lock, on this device, adds to it",
        )
    if problems:
        return ForeignDecision(
            f"{len(problems)} of {pinned} decisions that {path} pins cannot be served here",
            # without the device's 64 digits
            why="\n".join(f"{p.key.partition('/')[2] or p.key}: {p.reason}" for p in problems[:8]),
            todo="autosel export --lock --build makes missing builds; otherwise tune, then run autosel export --lock",
        )
    return None
