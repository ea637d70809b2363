"""Keep trials and quarantines: a candidate that brought down more than its worker is not tried again automatically.

A trial is opened before a candidate first runs and closed afterwards. A trial that was never closed was interrupted:
with the machine (or the container), which a candidate can bring down, or with the tuner alone, which more likely is a
`kill -9`. So a candidate is quarantined after two in a row of the first kind, or five of any kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel.ledger import schema as t
from autosel.ledger.rows import named, now, value_of
from autosel.values import Arm

MACHINE_STRIKES = 2  # in a row: power cuts happen, but hardly twice with the same candidate
STRIKES = 5  # in a row, of any kind: no tune gets past this candidate
CUT_SHORT = "cut short"  # the machine or the container went down with it
ENDED = "the tuner ended"  # only the tuner ended
FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Forbid a build to run an op on a device, with the reason."""

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


def active(connection: Connection, hw_id: str, op: str | None = None) -> list[Quarantine]:
    """Return quarantines in force on a device, oldest first."""
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
    return [
        Quarantine(
            arm=value_of(Arm, row.document),
            evidence=json.loads(row.evidence),
            **named(row, ("id", "digest", "hw_id", "op", "driver", "cause", "reason", "created_at")),
        )
        for row in connection.execute(query)
    ]


def released(connection: Connection, hw_id: str, op: str) -> dict[str, str]:
    """Return when the last quarantine of each build of an op ended on a device, by digest."""
    q, r = t.quarantines.c, t.releases.c
    query = (
        sa.select(q.digest, sa.func.max(r.created_at).label("ended"))
        .join(t.releases, r.quarantine_id == q.id)
        .where(q.hw_id == hw_id, q.op == op)
        .group_by(q.digest)
    )
    return {row.digest: row.ended for row in connection.execute(query)}


# --- trials -------------------------------------------------------------------------------------------------------


def boot() -> str:
    """Identify this run of the machine, or of this container: the kernel's boot id, and the start of process 1."""
    try:
        started = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]  # field 22, starttime
    except (OSError, IndexError):
        started = ""
    return f"{machine()} {started}"


def machine() -> str:
    """Identify this run of the machine: equal in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def close_trial(connection: Connection, trial_id: int, outcome: str) -> None:
    connection.execute(sa.insert(t.trial_ends).values(trial_id=trial_id, outcome=outcome, created_at=now()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Describe an arm whose trial was interrupted; `reason` says why it is to be quarantined, or is empty."""

    arm: Arm
    op: str
    strikes: int  # in a row, for this build
    reason: str

    @property
    def out(self) -> bool:
        return bool(self.reason)


def close_abandoned(connection: Connection, host: int, hw_id: str, unit: str = "") -> list[Strike]:
    """Close every open trial on a host's device. Only for the one process that may have such trials there."""
    trials, ends, here = t.trials.c, t.trial_ends.c, boot()
    ours = sa.or_(trials.host_id == host, trials.host_id.is_(None))
    query = (
        sa.select(trials.id, trials.op, trials.boot, t.candidates.c.document)
        .join(t.candidates, trials.candidate_id == t.candidates.c.id)
        .outerjoin(t.trial_ends, ends.trial_id == trials.id)
        .where(trials.hw_id == hw_id, trials.unit == unit, ours, ends.trial_id.is_(None))
    )
    found: dict[tuple[str, str], Strike] = {}
    for trial_id, op, then, document in connection.execute(query).all():
        close_trial(connection, trial_id, ENDED if then in ("", here) else CUT_SHORT)
        arm = value_of(Arm, document)
        found[op, arm.build or arm.digest] = _strike(connection, hw_id, op, arm)
    return list(found.values())


def _strike(connection: Connection, hw_id: str, op: str, arm: Arm) -> Strike:
    """Count the ends of this build's trials since the last completed one."""
    trials, ends = t.trials.c, t.trial_ends.c
    query = (
        sa.select(ends.outcome, t.candidates.c.document)
        .select_from(t.trials)
        .join(t.candidates, trials.candidate_id == t.candidates.c.id)
        .join(t.trial_ends, ends.trial_id == trials.id)
        .where(trials.hw_id == hw_id, trials.op == op, t.candidates.c.name == arm.candidate)
        .order_by(trials.id.desc())
    )
    with_machine = strikes = 0
    for outcome, document in connection.execute(query):
        other = value_of(Arm, document)
        if (other.build or other.digest) != (arm.build or arm.digest):
            continue
        if outcome == FINISHED:
            break
        with_machine += outcome == CUT_SHORT
        strikes += outcome in (CUT_SHORT, ENDED)
    reason = ""
    if with_machine >= MACHINE_STRIKES:
        reason = f"the machine went down {with_machine} times while it was tried"
    elif strikes >= STRIKES:
        reason = f"{strikes} tunes in a row ended while it was tried"
    return Strike(arm=arm, op=op, strikes=strikes, reason=reason)
