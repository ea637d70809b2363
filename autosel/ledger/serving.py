"""Choose the decisions that serve a host, from those that serve a key in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from autosel.ledger import containment, rows
from autosel.ledger import schema as t
from autosel.ledger.rows import StoredDecision
from autosel.values import Decision, length_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Hold a served decision. `host` decided it (its id; empty if unknown); `usable`: its arm has passed parity on this
    host."""

    key: str
    epoch: int
    decision: Decision
    host: str = ""
    usable: bool = True


def of(c: Connection, prover: int, *, everywhere: bool = False) -> tuple[Served, ...]:
    """Return the decisions that serve a host. If another host decided a key, and its arm has not passed parity here,
    the previous decision serves. `everywhere`: all serving decisions of the ledger, usable here or not."""
    found = rows.fetch(c, rows.stored(serving=True, host=prover).order_by(t.serving.c.key))
    served = [(s, s if everywhere else _usable(c, s, prover)) for s in found]
    return tuple(
        Served(key=s.key, epoch=s.epoch or 0, decision=ours.decision, host=ours.host, usable=s.usable)
        for s, ours in served
        if ours is not None
    )


def _usable(c: Connection, serves: StoredDecision, prover: int) -> StoredDecision | None:
    """Return the decision if its arm was proven here, else the latest earlier one that was, and is not quarantined."""
    found, held = serves, None
    while not found.usable:
        if found.previous_id is None:
            return None
        found = rows.one(c, found.previous_id, host=prover)
        if found.key != serves.key:
            return None
        if held is None:
            held = {q.digest for q in containment.active(c, found.decision.hw_id, found.decision.op)}
        if held & {found.decision.arm.digest, found.decision.arm.build}:
            return None
    return found


def settled(found: Sequence[StoredDecision], digests: set[str]) -> bool:
    """Return True if the rows of a bucket serve all its lengths, and nothing that they depend on has changed.

    `digests` are the arms eligible now, including the baseline.
    """
    return all(_still_holds(s, digests) for s in found) and _whole([s.decision for s in found])


def _still_holds(found: StoredDecision, now: set[str]) -> bool:
    d = found.decision
    if not found.usable:
        return False
    if d.baseline.digest not in now or d.arm.digest not in now:
        return False
    if d.state == "pinned":
        return True
    undecided = d.verdict is not None and d.verdict.outcome == "undecided"
    return not undecided and not d.stale and now <= set(found.entrants)


def _whole(found: Sequence[Decision]) -> bool:
    """Return True if the rows of a bucket serve all its lengths. A tune may have been killed between two parts."""
    if any(d.length_range is None for d in found) or not found:
        return True
    free, top = length_bucket(found[0].workload["L"])
    for low, high in sorted(d.length_range for d in found if d.length_range):
        if low > free:
            return False
        free = high + 1
    return free > top
