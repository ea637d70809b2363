"""A command: one change of the ledger, as a value; and the transaction in which the ledger's owner runs it.

    ledger.write(Demote(decision_id=41, reason="wrong token in request 7"))

A command travels as JSON and is decoded by the types of its fields, so it is data, never code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel.errors import LedgerError
from autosel.ledger import containment, rows
from autosel.ledger import schema as t
from autosel.ledger.host import here

R = TypeVar("R")
NOBODY = -1  # a host that has not stored anything yet


def prover(host: int | None, *, shared: bool) -> int:
    """Return whose proofs count for the row of a host: its own, or any in a file, which belongs to one host. An import
    contains no proofs."""
    return (host or NOBODY) if shared else rows.ANY_HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """An open write transaction. `known_host`: the row of this host, 0 if it is not known to be committed. `leases`:
    the devices that the sender holds, with the numbers of its leases."""

    c: Connection
    home: Path
    shared: bool
    known_host: int
    leases: Mapping[str, int]

    @property
    def host(self) -> int:
        """Return the row of this host, created at its first write."""
        return self.known_host or rows.put_host(self.c, here(self.home))

    @property
    def prover(self) -> int:
        """Return whose proofs count."""
        return prover(self.known_host or rows.host_id(self.c, here(self.home)), shared=self.shared)

    def refuse_stale(self, hw_id: str) -> str:
        """Return the unit that the sender holds of a device, if any. Raises LedgerError if another process has taken
        the lease since."""
        if hw_id not in self.leases:
            return ""
        lease, held = t.leases.c, self.leases[hw_id]
        unit = sa.select(lease.unit).where(lease.id == held).scalar_subquery()
        mine = sa.and_(lease.hw_id == hw_id, lease.machine == containment.machine(), lease.unit == unit)
        query = sa.select(lease.id, lease.holder, lease.created_at, lease.unit).where(mine)
        last = self.c.execute(query.order_by(lease.id.desc()).limit(1)).first()
        if last is None:
            raise LedgerError(f"no such lease: {held} of this device")
        if last.id != held:
            raise LedgerError(
                "another process has taken over this device: later measurements of this process are not stored",
                why=f"{last.holder} took it at {last.created_at[:19]}Z; was the folder of locks deleted?",
                todo="let it finish, then run the command again",
            )
        return str(last.unit)


class Command(Generic[R]):
    """One change of the ledger, with a result of type R. `call` is its name in JSON.

    `publishes`: the snapshot is replaced before the result is acknowledged. `repeatable`: it may run twice, if nobody
    knows whether it ran.
    """

    __slots__ = ()
    call: ClassVar[str]
    publishes: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True

    def run(self, tx: Transaction) -> R:
        raise NotImplementedError
