"""Trials and quarantine: a candidate that took its process down is remembered, and not tried again unasked.

A trial is opened before a candidate runs and closed after it. One that was never closed was cut short. In a worker the
cause may as well be the machine or the user's `kill -9` of the tuner, so it takes two; in a client's own process one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel import settings
from autosel.errors import LedgerError
from autosel.ledger import schema as t
from autosel.ledger.rows import insert, now, put_arm, text_of, value_of
from autosel.values import Arm

Stage = Literal["worker", "client"]
STRIKES: Mapping[Stage, int] = {"worker": 2, "client": 1}
CUT_SHORT = "cut short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A build that may not run an op on a device, and why."""

    id: int
    arm: Arm
    digest: str
    hw_id: str
    op: str
    driver: str
    cause: str
    reason: str
    evidence: Mapping[str, Any]
    created_at: str


def put_quarantine(connection: Connection, arm: Arm, **values: Any) -> int:
    values["evidence"] = text_of(values["evidence"])
    return insert(connection, t.quarantines, candidate_id=put_arm(connection, arm), **values, created_at=now())


def active(connection: Connection, hw_id: str, op: str | None = None, driver: str | None = None) -> list[Quarantine]:
    """Quarantines in force on a device, oldest first; `driver` "" was given where there is none."""
    q = t.quarantines.c
    query = (
        sa.select(t.quarantines, t.candidates.c.document)
        .join(t.candidates, q.candidate_id == t.candidates.c.id)
        .outerjoin(t.releases, t.releases.c.quarantine_id == q.id)
        .where(q.hw_id == hw_id, t.releases.c.quarantine_id.is_(None))
        .order_by(q.id)
    )
    if op is not None:
        query = query.where(q.op == op)
    if driver is not None:
        query = query.where(q.driver == driver)
    return [
        Quarantine(
            id=row.id,
            arm=value_of(Arm, row.document),
            digest=row.digest,
            hw_id=row.hw_id,
            op=row.op,
            driver=row.driver,
            cause=row.cause,
            reason=row.reason,
            evidence=json.loads(row.evidence),
            created_at=row.created_at,
        )
        for row in connection.execute(query)
    ]


def release(connection: Connection, quarantine_id: int, reason: str) -> None:
    known = connection.execute(sa.select(t.quarantines.c.id).where(t.quarantines.c.id == quarantine_id)).scalar()
    if known is None:
        raise LedgerError(f"there is no quarantine {quarantine_id}", todo=f"{settings.spelling()} doctor lists them")
    done = sa.select(t.releases.c.quarantine_id).where(t.releases.c.quarantine_id == quarantine_id)
    if connection.execute(done).scalar() is None:
        connection.execute(sa.insert(t.releases).values(quarantine_id=quarantine_id, reason=reason, created_at=now()))


# --- trials -------------------------------------------------------------------------------------------------------


def open_trial(connection: Connection, hw_id: str, op: str, arm: Arm, stage: Stage) -> int:
    candidate_id = put_arm(connection, arm)
    return insert(connection, t.trials, candidate_id=candidate_id, hw_id=hw_id, op=op, stage=stage, created_at=now())


def close_trial(connection: Connection, trial_id: int, outcome: str) -> None:
    connection.execute(sa.insert(t.trial_ends).values(trial_id=trial_id, outcome=outcome, created_at=now()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """An arm whose trial was cut short; `strikes` so far, `out` when that is too many."""

    arm: Arm
    op: str
    strikes: int
    out: bool


def close_abandoned(connection: Connection, hw_id: str, stage: Stage) -> list[Strike]:
    """Close every open trial of a device as cut short. Only for the one process that may hold such trials there."""
    trials, ends = t.trials.c, t.trial_ends.c
    mine = sa.and_(trials.hw_id == hw_id, trials.stage == stage)
    query = (
        sa.select(trials.id, trials.op, t.candidates.c.document)
        .join(t.candidates, trials.candidate_id == t.candidates.c.id)
        .outerjoin(t.trial_ends, ends.trial_id == trials.id)
        .where(mine, ends.trial_id.is_(None))
    )
    found: dict[tuple[str, str], Strike] = {}
    for trial_id, op, document in connection.execute(query).all():
        close_trial(connection, trial_id, CUT_SHORT)
        arm = value_of(Arm, document)
        count = _strikes(connection, hw_id, op, arm, stage)
        found[op, arm.digest] = Strike(arm=arm, op=op, strikes=count, out=count >= STRIKES[stage])
    return list(found.values())


def _strikes(connection: Connection, hw_id: str, op: str, arm: Arm, stage: Stage) -> int:
    trials = t.trials.c
    query = (
        sa.select(sa.func.count())
        .select_from(t.trials)
        .join(t.candidates, trials.candidate_id == t.candidates.c.id)
        .join(t.trial_ends, t.trial_ends.c.trial_id == trials.id)
        .where(trials.hw_id == hw_id, trials.op == op, trials.stage == stage)
        .where(t.candidates.c.digest == arm.digest, t.trial_ends.c.outcome == CUT_SHORT)
    )
    return int(connection.execute(query).scalar() or 0)
