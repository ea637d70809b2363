"""Convert values to rows and back. Called inside a transaction of `engine.Database`; writers are serialised, so "look,
then insert" is safe."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Row, Select, Table

from autosel import settings
from autosel.errors import LedgerError
from autosel.ledger import schema as t
from autosel.ledger.host import Host
from autosel.values import (
    Arm,
    Decision,
    Failed,
    Fingerprint,
    Parity,
    Passed,
    Race,
    Verdict,
    Workload,
    digest,
    from_json,
    to_json,
)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def text_of(value: Any) -> str:
    """Encode as JSON that keeps 1.0 a float (RFC 8785 writes 1, and a trait would come back as another computation) and
    may contain the NaN of a failed check."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=4096)
def value_of(kind: Any, text: str) -> Any:
    """Decode a stored document. Raises LedgerError; documents written by autosel always decode."""
    try:
        return from_json(kind, json.loads(text))
    except ValueError as error:
        raise _unreadable(kind, error) from error


def _unreadable(kind: Any, error: Exception) -> LedgerError:
    return LedgerError(f"the ledger holds a {kind} that cannot be read", why=str(error), todo="run `db check`")


# Statements are built once and given values each time: building takes several times as long as running.


@cache
def _inserting(table: Table) -> sa.Insert:
    return sa.insert(table)


@cache
def _finding(table: Table, columns: tuple[str, ...]) -> Select[Any]:
    """Return a statement for the id of the row whose columns equal `of_<column>`."""
    return sa.select(table.c.id).where(*(table.c[name] == sa.bindparam(f"of_{name}") for name in columns))


def find(connection: Connection, table: Table, **values: Any) -> int | None:
    query = _finding(table, tuple(values))
    found = connection.execute(query, {f"of_{name}": value for name, value in values.items()}).scalar()
    return int(found) if found is not None else None


def insert(connection: Connection, table: Table, **values: Any) -> int:
    result = connection.execute(_inserting(table), values)
    made: int = result.inserted_primary_key[0] if result.inserted_primary_key else 0
    return made


def _once(connection: Connection, table: Table, column: str, **values: Any) -> int:
    """Return the id of the row with this unique column, inserting it if it is new."""
    found = find(connection, table, **{column: values[column]})
    return found if found is not None else insert(connection, table, **values)


# --- evidence -----------------------------------------------------------------------------------------------------


def host_id(connection: Connection, host: Host) -> int | None:
    return find(connection, t.hosts, host=host.id)


def put_host(connection: Connection, host: Host) -> int:
    return _once(connection, t.hosts, "host", host=host.id, name=host.name, created_at=now())


def put_fingerprint(connection: Connection, fp: Fingerprint) -> int:
    return _once(
        connection,
        t.fingerprints,
        "digest",
        hw_id=fp.hw_id,
        env_id=fp.env_id,
        digest=digest(fp),
        document=text_of(fp),
        created_at=now(),
    )


def put_workload(connection: Connection, w: Workload) -> int:
    return _once(connection, t.workloads, "key", key=w.key, op=w.op, bucket=w.bucket, document=text_of(w))


def put_arm(connection: Connection, arm: Arm) -> int:
    return _once(
        connection,
        t.candidates,
        "document_digest",
        name=arm.candidate,
        backend=arm.backend,
        digest=arm.digest,
        document_digest=digest(arm),
        document=text_of(arm),
    )


def put_parity(connection: Connection, host: int, hw_id: str, w: Workload, arm: Arm, parity: Parity) -> int:
    """Store this proof of a host unless it is stored already; return its id."""
    values = {
        "candidate_id": put_arm(connection, arm),
        "workload_id": put_workload(connection, w),
        "host_id": host,
        "hw_id": hw_id,
        "scope": w.bucket,
        "outcome": "passed" if isinstance(parity, Passed) else "failed",
        "document": text_of(parity),
    }
    found = find(connection, t.parities, **values)
    return found if found is not None else insert(connection, t.parities, **values, created_at=now())


def parity_of(outcome: str, document: str) -> Parity:
    made: Parity = value_of(Passed if outcome == "passed" else Failed, document)
    return made


def proofs(connection: Connection, decision_id: int) -> list[tuple[Arm, Parity]]:
    """Return the proofs on which a decision rests."""
    p = t.parities.c
    query = (
        sa.select(t.candidates.c.document.label("arm"), p.outcome, p.document)
        .select_from(t.decision_parities)
        .join(t.parities, t.decision_parities.c.parity_id == p.id)
        .join(t.candidates, p.candidate_id == t.candidates.c.id)
        .where(t.decision_parities.c.decision_id == decision_id)
        .order_by(p.id)
    )
    return [(value_of(Arm, r.arm), parity_of(r.outcome, r.document)) for r in connection.execute(query)]


def put_race(connection: Connection, fingerprint_id: int, race: Race) -> int:
    document = text_of(race).encode()
    return insert(
        connection,
        t.races,
        workload_id=put_workload(connection, race.workload),
        fingerprint_id=fingerprint_id,
        digest=sha256(document).hexdigest(),
        document=zlib.compress(document, 6),
        created_at=now(),
    )


def race_of(document: bytes) -> Race:
    try:
        made: Race = from_json(Race, json.loads(zlib.decompress(document)))
    except (ValueError, zlib.error) as error:
        raise _unreadable("race", error) from error
    return made


def put_verdict(connection: Connection, race_id: int | None, verdict: Verdict) -> int:
    return insert(
        connection,
        t.verdicts,
        race_id=race_id,
        outcome=verdict.outcome,
        document=text_of(verdict),
        created_at=now(),
    )


# --- decisions ----------------------------------------------------------------------------------------------------

_arm, _baseline = t.candidates.alias("arm"), t.candidates.alias("baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDecision:
    """Hold a decision with the ids of its evidence."""

    decision: Decision
    key: str
    workload_id: int
    fingerprint_id: int | None
    arm_id: int
    baseline_id: int
    race_id: int | None
    verdict_id: int | None
    previous_id: int | None
    entrants: tuple[str, ...]
    epoch: int | None = None  # if it serves now
    proven: bool = True  # its arm, on the given host; checked only for a decision that serves
    host: str = ""  # the host that decided

    @property
    def usable(self) -> bool:
        """Return True if the given host may serve it. The baseline needs no proof."""
        return self.proven or self.decision.arm.digest == self.decision.baseline.digest


ANY_HOST = 0


def _proven(host: int) -> sa.ColumnElement[bool]:
    """Return True if the arm has passed parity in the decision's bucket on this host."""
    p, c, d = t.parities.c, t.candidates.alias("proven"), t.decisions.c
    same = sa.and_(p.scope == d.bucket, p.hw_id == d.hw_id, p.outcome == "passed", c.c.digest == _arm.c.digest)
    wanted = sa.select(p.id).join(c, p.candidate_id == c.c.id).where(same)
    if host != ANY_HOST:
        wanted = wanted.where(p.host_id == host)
    return sa.exists(wanted.correlate(t.decisions, _arm))


@cache
def stored(*, serving: bool = False, host: int = ANY_HOST, proven: bool = False) -> Select[Any]:
    """Select decisions with everything that their values need: only those that serve now, or all. The arm's proof on
    `host` is checked where the decision serves, or with `proven`."""
    source = (
        t.decisions.join(t.workloads, t.decisions.c.workload_id == t.workloads.c.id)
        .join(_arm, t.decisions.c.arm_id == _arm.c.id)
        .join(_baseline, t.decisions.c.baseline_id == _baseline.c.id)
        .outerjoin(t.verdicts, t.decisions.c.verdict_id == t.verdicts.c.id)
        .outerjoin(t.hosts, t.decisions.c.host_id == t.hosts.c.id)
    )
    on = t.serving.c.decision_id == t.decisions.c.id
    source = source.join(t.serving, on) if serving else source.outerjoin(t.serving, on)
    return sa.select(
        t.decisions,
        t.workloads.c.document.label("workload"),
        _arm.c.document.label("arm"),
        _baseline.c.document.label("baseline"),
        t.verdicts.c.document.label("verdict"),
        t.serving.c.epoch.label("epoch"),
        t.hosts.c.host.label("host"),
        (_proven(host) if serving or proven else sa.literal(1)).label("proven"),
    ).select_from(source)


def fetch(connection: Connection, query: Select[Any], **values: Any) -> list[StoredDecision]:
    return [_stored_of(row) for row in connection.execute(query, values)]


# Columns of `decisions` under the names that they have in a Decision, and in a StoredDecision.
OF_VALUE = ("state", "hw_id", "op", "bucket", "mode", "reason", "stale")
IDS = ("workload_id", "fingerprint_id", "arm_id", "baseline_id", "race_id", "verdict_id", "previous_id")


def named(found: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return attributes by name."""
    return {name: getattr(found, name) for name in names}


def _stored_of(row: Row[Any]) -> StoredDecision:
    decision = Decision(
        id=row.id,
        workload=value_of(Workload, row.workload),
        arm=value_of(Arm, row.arm),
        baseline=value_of(Arm, row.baseline),
        verdict=value_of(Verdict, row.verdict) if row.verdict else None,
        created_at=row.created_at,
        length_range=None if row.length_from is None else (row.length_from, row.length_to),
        **named(row, OF_VALUE),
    )
    return StoredDecision(
        decision=decision,
        key=row.key,
        **named(row, IDS),
        entrants=tuple(json.loads(row.entrants)),
        epoch=row.epoch,
        proven=bool(row.proven),
        host=row.host or "",
    )


@cache
def _one(host: int | None) -> Select[Any]:
    query = stored() if host is None else stored(host=host, proven=True)
    return query.where(t.decisions.c.id == sa.bindparam("of"))


LARGEST_ID = 2**63 - 1  # largest integer of databases, which refuse a query with a larger one


def one(connection: Connection, decision_id: int, *, host: int | None = None) -> StoredDecision:
    """Return one decision; with `host`, also whether its arm was proven there. Raises LedgerError if it does not
    exist."""
    found = fetch(connection, _one(host), of=decision_id) if 0 < decision_id <= LARGEST_ID else ()
    if not found:
        last = connection.execute(sa.select(sa.func.max(t.decisions.c.id))).scalar()
        raise LedgerError(
            f"no such decision: {decision_id}",
            why=f"the last one is {last}" if last else "there are none yet",
            todo=f"{settings.spelling()} explain --history",
        )
    return found[0]


@cache
def _at_key() -> Select[Any]:
    return stored(serving=True).where(t.serving.c.key == sa.bindparam("of"))


def at_key(connection: Connection, key: str) -> StoredDecision | None:
    found = fetch(connection, _at_key(), of=key)
    return found[0] if found else None


@cache
def _of_bucket(host: int) -> Select[Any]:
    d = t.decisions.c
    here = sa.and_(*(d[name] == sa.bindparam(f"of_{name}") for name in ("hw_id", "mode", "bucket")))
    return stored(serving=True, host=host).where(here).order_by(d.length_to)


def of_bucket(connection: Connection, hw_id: str, mode: str, bucket: str, host: int = ANY_HOST) -> list[StoredDecision]:
    """Return the rows that serve a bucket now: one, or one for each part of a split."""
    return fetch(connection, _of_bucket(host), of_hw_id=hw_id, of_mode=mode, of_bucket=bucket)


def serve(connection: Connection, key: str, decision_id: int, displaced: Sequence[str] = ()) -> None:
    """Let a decision serve its key from the next epoch on, instead of the `displaced` keys."""
    last = connection.execute(_LAST).scalar() or 0
    for gone in displaced:
        if gone != key:
            connection.execute(_REMOVE, {"of": gone})
    if connection.execute(_REPLACE, {"of": key, "by": decision_id, "at": last + 1}).rowcount == 0:
        connection.execute(_inserting(t.serving), {"key": key, "decision_id": decision_id, "epoch": last + 1})


_LAST = sa.select(sa.func.max(t.serving.c.epoch))
_REMOVE = sa.delete(t.serving).where(t.serving.c.key == sa.bindparam("of"))
_REPLACE = (
    sa.update(t.serving)
    .where(t.serving.c.key == sa.bindparam("of"))
    .values(decision_id=sa.bindparam("by"), epoch=sa.bindparam("at"))
)
