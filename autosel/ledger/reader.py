"""Read a ledger: what serves, the history with its evidence, quarantines, and error budgets."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel.ledger import containment, evidence, migrate, rows, serving, snapshot
from autosel.ledger import schema as t
from autosel.ledger.containment import Quarantine
from autosel.ledger.engine import Database
from autosel.ledger.host import here
from autosel.ledger.serving import Served
from autosel.ledger.transaction import prover
from autosel.values import WHOLE_STEP, Arm, Decision, Failed, Fingerprint, Parity, Passed, Race, Workload, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Hold a decision and all its evidence. `previous` is the decision that served the key before."""

    decision: Decision
    fingerprint: Fingerprint | None
    race: Race | None
    parities: tuple[tuple[Arm, Parity], ...]
    previous: Decision | None
    serves: bool


class LedgerReader:
    """Read the ledger of a home. Threads may share it."""

    def __init__(self, database: Database, home: Path) -> None:
        self._database, self.home = database, home
        self._documents: dict[int, dict[str, Any]] = {}
        self._host_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def name(self) -> str:
        return self._database.name

    @property
    def writable(self) -> bool:
        return self._database.writable

    @property
    def shared(self) -> bool:
        """Return True if other hosts read and write it too."""
        return self._database.shared

    @property
    def url(self) -> sa.URL:
        return self._database.url

    @property
    def failed(self) -> bool:
        """Return True if a write or an fsync failed. Then this object only reads; the ledger can be opened again."""
        return self._database.failed

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a consistent view of the tables, for queries that no method here answers."""
        return self._database.reading()

    # --- what serves ------------------------------------------------------------------------------------------------

    def serving(self, *, everywhere: bool = False) -> tuple[Served, ...]:
        """Return the decisions that serve this host. If another host decided a key, and its arm has not passed parity
        here, the previous decision serves. `everywhere`: all serving decisions of the ledger, usable here or not."""
        with self._database.reading() as c:
            return serving.of(c, self._prover(c), everywhere=everywhere)

    def _prover(self, c: Connection) -> int:
        if not self._host_id:  # before this host's first write; what is read here is committed
            self._host_id = rows.host_id(c, here(self.home)) or 0
        return prover(self._host_id, shared=self.shared)

    def known(self, hw_id: str, bucket: str, mode: str, digests: Iterable[str]) -> Decision | None:
        """Return the settled decision of a bucket, if nothing that it depends on has changed, so that no measurement is
        needed; of a split bucket the row for the longest contexts.

        `digests` are the arms eligible now, including the baseline. Return None for a new or edited arm, another
        baseline, or an undecided verdict.
        """
        found = self.known_rows(hw_id, bucket, mode, digests)
        return found[-1] if found else None

    def known_rows(self, hw_id: str, bucket: str, mode: str, digests: Iterable[str]) -> tuple[Decision, ...]:
        """Return all rows of a settled bucket, or none."""
        now = set(digests)
        with self._database.reading() as c:
            found = rows.of_bucket(c, hw_id, mode, bucket, self._prover(c))
        return tuple(s.decision for s in found) if serving.settled(found, now) else ()

    def serving_rows(self, hw_id: str, bucket: str, mode: str) -> tuple[Decision, ...]:
        """Return the decisions that serve a bucket now: one, or one for each part of a split, shortest contexts
        first."""
        with self._database.reading() as c:
            return tuple(s.decision for s in rows.of_bucket(c, hw_id, mode, bucket))

    def offered(self, hw_id: str, mode: str) -> tuple[Decision, ...]:
        """Return decisions of other hosts for this kind of device that wait for this host's proof of their arm."""
        found = self.serving(everywhere=True)
        return tuple(s.decision for s in found if not s.usable and (s.decision.hw_id, s.decision.mode) == (hw_id, mode))

    def incomplete(self, hw_id: str = "", mode: str = "") -> tuple[tuple[Decision, Passed], ...]:
        """Return decisions that serve, of this device and mode if given, whose proof left out rows of their op's array,
        with that proof. Stale ones are proven again in any case."""
        found = []
        for served in self.serving():
            d = served.decision
            if d.op == WHOLE_STEP or d.stale or (hw_id and (d.hw_id, d.mode) != (hw_id, mode)):
                continue
            known = self.parity_known(d.hw_id, d.arm.digest, d.workload)
            if isinstance(known, Passed) and 0 < known.pairs < known.pairs_of:
                found.append((d, known))
        return tuple(found)

    def export(self, path: Path | None = None) -> dict[str, Any]:
        """Return the serving decisions in the snapshot's format; also write them to `path` if given."""
        served = self.serving()
        epoch = max((s.epoch for s in served), default=0)
        lines = [{"key": s.key, "epoch": s.epoch, "decision": self._document(s.decision)} for s in served]
        made = snapshot.document(epoch, lines)
        if path is not None:
            snapshot.write(path, made)
        return made

    def _document(self, decision: Decision) -> dict[str, Any]:
        """Return a decision as JSON, which is cached because a decision never changes."""
        if decision.id not in self._documents:
            self._documents[decision.id] = to_json(decision)
        return self._documents[decision.id]

    # --- evidence ---------------------------------------------------------------------------------------------------

    def parity_known(self, hw_id: str, digest: str, workload: Workload, *, since: str = "") -> Parity | None:
        """Return this host's latest proof of the arm with this digest, for the workload's bucket, dtype and traits. A
        failure from before `since` is ignored."""
        p = t.parities.c
        query = (
            sa.select(p.outcome, p.document, p.created_at)
            .join(t.candidates, p.candidate_id == t.candidates.c.id)
            .where(p.hw_id == hw_id, p.scope == workload.bucket, t.candidates.c.digest == digest)
            .order_by(p.id.desc())
            .limit(1)
        )
        with self._database.reading() as c:
            of = self._prover(c)
            row = c.execute(query if of == rows.ANY_HOST else query.where(p.host_id == of)).first()
        known = rows.parity_of(row.outcome, row.document) if row else None
        return None if isinstance(known, Failed) and row is not None and row.created_at < since else known

    def decision(self, decision_id: int) -> Decision:
        """Return a decision with its evidence. Raises LedgerError if it does not exist."""
        with self._database.reading() as c:
            return rows.one(c, decision_id).decision

    def evidence(self, decision_id: int) -> Evidence:
        with self._database.reading() as c:
            found = rows.one(c, decision_id)
            race = _document(c, t.races, found.race_id)
            fingerprint = _document(c, t.fingerprints, found.fingerprint_id)
            return Evidence(
                decision=found.decision,
                fingerprint=rows.value_of(Fingerprint, fingerprint) if fingerprint else None,
                race=rows.race_of(race) if race else None,
                parities=tuple(rows.proofs(c, decision_id)),
                previous=rows.one(c, found.previous_id).decision if found.previous_id else None,
                serves=found.epoch is not None,
            )

    def history(
        self, op: str | None = None, *, hw_id: str = "", limit: int | None = None, before: int | None = None
    ) -> list[Decision]:
        """Return decisions, newest first; `before`: only those with a lower number."""
        query = rows.stored().order_by(t.decisions.c.id.desc()).limit(limit)
        if hw_id:
            query = query.where(t.decisions.c.hw_id == hw_id)
        if op is not None:
            query = query.where(t.decisions.c.op == op)
        if before is not None:
            query = query.where(t.decisions.c.id < before)
        with self._database.reading() as c:
            return [s.decision for s in rows.fetch(c, query)]

    # --- quarantines and error budgets ------------------------------------------------------------------------------

    def quarantined(self, hw_id: str, op: str | None = None) -> dict[str, Quarantine]:
        """Return quarantines by build digest."""
        with self._database.reading() as c:
            return {q.digest: q for q in containment.active(c, hw_id, op)}

    def released(self, hw_id: str, op: str) -> dict[str, str]:
        """Return when the last quarantine of each build of an op ended on a device, by digest."""
        with self._database.reading() as c:
            return containment.released(c, hw_id, op)

    def spent(self, key: str) -> float:
        with self._database.reading() as c:
            return evidence.spent(c, key)

    def aa(self, hw_id: str, time_class: str) -> tuple[int, int]:
        """Return (A/A sessions, how many crossed) so far on this device for ops of this duration."""
        a = t.aa_sessions.c
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(a.crossed), 0))
        with self._database.reading() as c:
            count, crossed = c.execute(query.where(a.hw_id == hw_id, a.time_class == time_class)).one()
        return int(count), int(crossed)

    def backup(self, path: Path) -> None:
        """Make a consistent copy of a SQLite ledger while it is in use."""
        migrate.backup(self._database, path)

    def check(self) -> None:
        """Check every page, index and reference. Raises LedgerError if something is damaged."""
        migrate.check(self._database, deep=True)


def _document(c: Connection, table: sa.Table, row_id: int | None) -> Any:
    if row_id is None:
        return None
    return c.execute(sa.select(table.c.document).where(table.c.id == row_id)).scalar()
