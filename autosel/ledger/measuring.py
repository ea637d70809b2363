"""Commands of a process that measures on a device: take it, journal the trials of arms, and quarantine those that
failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sqlalchemy as sa

from autosel import settings
from autosel.errors import LedgerError
from autosel.ledger import containment, rows
from autosel.ledger import schema as t
from autosel.ledger.containment import Strike
from autosel.ledger.decide import follow
from autosel.ledger.transaction import Command, Transaction
from autosel.values import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver(Command[tuple[int, tuple[Strike, ...]]]):
    """Take a new lease of a device, which ends all earlier ones; open trials of their holders are closed.

    The result is the lease, and the arms of those trials; those with too many strikes are quarantined.
    """

    call: ClassVar[str] = "take_over"
    hw_id: str
    holder: str
    unit: str = ""

    def run(self, tx: Transaction) -> tuple[int, tuple[Strike, ...]]:
        values = {"hw_id": self.hw_id, "machine": containment.machine(), "holder": self.holder, "unit": self.unit}
        lease = rows.insert(tx.c, t.leases, **values, created_at=rows.now())
        strikes = containment.close_abandoned(tx.c, tx.host, self.hw_id, self.unit)
        for strike in strikes:
            if strike.out:
                Hold(
                    arm=strike.arm,
                    hw_id=self.hw_id,
                    op=strike.op,
                    cause=containment.CUT_SHORT,
                    reason=strike.reason,
                    digest=strike.arm.build or strike.arm.digest,
                    evidence={"strikes": strike.strikes},
                ).run(tx)
        return lease, tuple(strikes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTrial(Command[int]):
    """Open the trial of an arm that is about to run. The result is its number."""

    call: ClassVar[str] = "open_trial"
    publishes: ClassVar[bool] = False
    hw_id: str
    op: str
    arm: Arm

    def run(self, tx: Transaction) -> int:
        where = {
            "hw_id": self.hw_id,
            "unit": tx.refuse_stale(self.hw_id),
            "boot": containment.boot(),
            "host_id": tx.host,
        }
        what = {"candidate_id": rows.put_arm(tx.c, self.arm), "op": self.op, "stage": "worker"}
        return rows.insert(tx.c, t.trials, **where, **what, created_at=rows.now())


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTrial(Command[None]):
    call: ClassVar[str] = "close_trial"
    publishes: ClassVar[bool] = False
    trial_id: int
    outcome: str

    def run(self, tx: Transaction) -> None:
        containment.close_trial(tx.c, self.trial_id, self.outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Command[int]):
    """Quarantine a build (`digest`; default the arm's) of an op on a device; the baseline serves in its place.

    The result is the number of the quarantine.
    """

    call: ClassVar[str] = "quarantine"
    arm: Arm
    hw_id: str
    op: str
    cause: str
    reason: str
    digest: str = ""
    driver: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def run(self, tx: Transaction) -> int:
        arm, held = self.arm, {"hw_id": self.hw_id, "op": self.op, "driver": self.driver, "cause": self.cause}
        held |= {"digest": self.digest or arm.digest, "reason": self.reason, "evidence": rows.text_of(self.evidence)}
        build = rows.put_arm(tx.c, arm)
        made = rows.insert(tx.c, t.quarantines, candidate_id=build, **held, created_at=rows.now())
        here = sa.and_(t.decisions.c.hw_id == self.hw_id, t.decisions.c.op == self.op)
        for s in rows.fetch(tx.c, rows.stored(serving=True).where(here)):
            same = s.decision.arm.candidate == arm.candidate and s.decision.arm.build == arm.build
            if same and s.arm_id != s.baseline_id:
                key = f"quarantine-{made}-{s.decision.id}"
                follow(tx.c, tx.host, s, state="quarantined", arm_id=s.baseline_id, reason=self.reason, key=key)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Command[None]):
    """End a quarantine. Its demotions last until the next race, which the next tune runs."""

    call: ClassVar[str] = "release"
    publishes: ClassVar[bool] = False
    quarantine_id: int
    reason: str

    def run(self, tx: Transaction) -> None:
        number = self.quarantine_id
        if rows.find(tx.c, t.quarantines, id=number) is None:
            raise LedgerError(f"no such quarantine: {number}", todo=f"{settings.spelling()} doctor lists them")
        done = sa.select(t.releases.c.quarantine_id).where(t.releases.c.quarantine_id == number)
        if tx.c.execute(done).scalar() is None:
            values = {"quarantine_id": number, "reason": self.reason, "created_at": rows.now()}
            tx.c.execute(sa.insert(t.releases).values(**values))
