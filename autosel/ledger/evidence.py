"""Commands that store evidence apart from a decision: proofs, debits of error budgets, A/A sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel.ledger import rows
from autosel.ledger import schema as t
from autosel.ledger.key import LIFETIME_BUDGET
from autosel.ledger.transaction import Command, Transaction
from autosel.values import Arm, Parity, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveParity(Command[int]):
    """Store one proof at once, so that a killed tune need not repeat it. The result is its id."""

    call: ClassVar[str] = "save_parity"
    publishes: ClassVar[bool] = False
    hw_id: str
    workload: Workload
    arm: Arm
    parity: Parity

    def run(self, tx: Transaction) -> int:
        return rows.put_parity(tx.c, tx.host, self.hw_id, self.workload, self.arm, self.parity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend(Command[bool]):
    """Debit an attempt's false-promotion bound from the lifetime of `key` (`key.budget_key`). The result is False, with
    nothing debited, if it exceeds the rest."""

    call: ClassVar[str] = "spend"
    publishes: ClassVar[bool] = False
    key: str
    amount: float
    reason: str = ""

    def run(self, tx: Transaction) -> bool:
        tx.refuse_stale(self.key.partition("/")[0])
        most = LIFETIME_BUDGET * (1 + 1e-9)
        values = {"of": self.key, "more": self.amount, "why": self.reason, "at": rows.now(), "most": most}
        return tx.c.execute(_DEBIT, values).rowcount == 1


_SPENT = sa.select(sa.func.coalesce(sa.func.sum(t.debits.c.amount), 0.0)).where(t.debits.c.key == sa.bindparam("of"))
_DEBIT = sa.insert(t.debits).from_select(  # checked and debited in one statement
    ["key", "amount", "reason", "created_at"],
    sa.select(
        sa.bindparam("of", type_=sa.Text),
        sa.bindparam("more", type_=sa.Float),
        sa.bindparam("why", type_=sa.Text),
        sa.bindparam("at", type_=sa.Text),
    ).where(_SPENT.scalar_subquery() + sa.bindparam("more", type_=sa.Float) <= sa.bindparam("most", type_=sa.Float)),
)


def spent(c: Connection, key: str) -> float:
    return float(c.execute(_SPENT, {"of": key}).scalar_one())


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAA(Command[None]):
    """Store A/A sessions: whether a clone of the baseline crossed the threshold against it."""

    call: ClassVar[str] = "save_aa"
    publishes: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False  # they would count double
    hw_id: str
    time_class: str
    crossings: tuple[bool, ...]

    def run(self, tx: Transaction) -> None:
        tx.refuse_stale(self.hw_id)
        for crossed in self.crossings:
            values = {"hw_id": self.hw_id, "time_class": self.time_class, "crossed": int(crossed)}
            rows.insert(tx.c, t.aa_sessions, **values, created_at=rows.now())
