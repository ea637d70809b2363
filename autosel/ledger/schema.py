"""Define the ledger's tables. History is appended; only `serving` changes. `db/versions/` creates these tables.

Documents are canonical JSON of the values in `autosel.values`; a race's document is compressed, because it contains
every sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import (
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)
from sqlalchemy.dialects.sqlite import REAL
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

HEAD = "0006"  # the Alembic revision of this code; a test compares it with db/versions/

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)
REAL64: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")  # the type's only name in SQLite's STRICT tables


def _table(name: str, *items: SchemaItem) -> Table:
    return Table(name, METADATA, *items, sqlite_strict=True)


def _id() -> Column[int]:
    return Column("id", Integer, primary_key=True)


def _to(table: str, column: str = "", *, required: bool = True) -> Column[int]:
    return Column(column or f"{table[:-1]}_id", Integer, ForeignKey(f"{table}.id"), nullable=not required)


def _unique(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, unique=True)


def _texts(*names: str) -> Iterator[Column[str]]:
    return (Column(name, Text, nullable=False) for name in names)


# Origin: a home on a machine. Unknown for rows from before there were hosts.
hosts = _table("hosts", _id(), _unique("host"), *_texts("name", "created_at"))


def _host() -> Column[int]:
    return Column("host_id", Integer, ForeignKey("hosts.id"))


def _unit() -> Column[str]:
    return Column("unit", Text, nullable=False, server_default="")


fingerprints = _table(
    "fingerprints",
    _id(),
    *_texts("hw_id", "env_id"),
    _unique("digest"),
    *_texts("document", "created_at"),
)

workloads = _table("workloads", _id(), _unique("key"), *_texts("op", "bucket", "document"))

# One row for each candidate with its build and knobs. `digest` is the arm's; `document_digest` covers the whole row,
# because one digest may appear with another recipe (a moved folder).
candidates = _table(
    "candidates",
    _id(),
    *_texts("name", "backend", "digest"),
    _unique("document_digest"),
    *_texts("document"),
    CheckConstraint("length(digest) > 0", name="digest_given"),
)

parities = _table(
    "parities",
    _id(),
    _to("candidates"),
    _to("workloads"),
    *_texts("hw_id", "scope", "outcome", "document", "created_at"),  # scope: the bucket the proof covers
    _host(),
    CheckConstraint("outcome IN ('passed', 'failed')", name="outcome"),
)
Index(None, parities.c.scope, parities.c.hw_id)

races = _table(
    "races",
    _id(),
    _to("workloads"),
    _to("fingerprints"),
    *_texts("digest"),
    Column("document", LargeBinary, nullable=False),
    *_texts("created_at"),
)

verdicts = _table(
    "verdicts",
    _id(),
    _to("races", required=False),
    *_texts("outcome", "document", "created_at"),
    CheckConstraint("outcome IN ('promote', 'tie', 'lose', 'undecided')", name="outcome"),
)

decisions = _table(
    "decisions",
    _id(),
    *_texts("key", "state", "hw_id", "op", "bucket", "mode"),
    Column("length_from", Integer),
    Column("length_to", Integer),
    _to("workloads"),
    _to("fingerprints", required=False),
    _to("candidates", "arm_id"),
    _to("candidates", "baseline_id"),
    _to("races", required=False),
    _to("verdicts", required=False),
    _to("decisions", "previous_id", required=False),
    *_texts("entrants"),  # JSON list of the digests of all arms considered, so that a new one is noticed
    *_texts("reason"),
    _unique("idempotency_key"),
    *_texts("created_at"),
    _host(),
    Column("stale", Text, nullable=False, server_default=""),
    CheckConstraint("state IN ('promoted', 'kept', 'demoted', 'quarantined', 'pinned')", name="state"),
    CheckConstraint("(length_from IS NULL) = (length_to IS NULL)", name="length_range"),
    CheckConstraint("length_from IS NULL OR length_from BETWEEN 1 AND length_to", name="length_order"),
)
Index(None, decisions.c.op)
Index(None, decisions.c.hw_id, decisions.c.bucket, decisions.c.mode)

decision_parities = _table(
    "decision_parities",
    Column("decision_id", Integer, ForeignKey("decisions.id"), primary_key=True),
    Column("parity_id", Integer, ForeignKey("parities.id"), primary_key=True),
)

# The only rows that change: the serving decisions. Each change takes the next epoch.
serving = _table(
    "serving",
    Column("key", Text, primary_key=True),
    _to("decisions"),
    Column("epoch", Integer, nullable=False, unique=True),
    CheckConstraint("epoch > 0", name="epoch"),
)

# Who may measure on a device. The latest lease of a device, machine and unit is in force; an older one can no longer
# write. `unit` distinguishes equal devices of a machine (a GPU's UUID); it is empty for a single device, such as the
# CPU.
leases = _table("leases", _id(), *_texts("hw_id", "machine", "holder", "created_at"), _unit())
Index(None, leases.c.hw_id, leases.c.machine)

# A trial without an end was interrupted: the tuner, or the machine, ended with the candidate in a worker.
trials = _table(
    "trials",
    _id(),
    _to("candidates"),
    *_texts("hw_id", "op", "stage", "created_at"),
    Column("boot", Text, nullable=False, server_default=""),
    _host(),
    _unit(),
    CheckConstraint("stage IN ('worker', 'client')", name="stage"),
)
trial_ends = _table(
    "trial_ends",
    Column("trial_id", Integer, ForeignKey("trials.id"), primary_key=True),
    *_texts("outcome", "created_at"),
)

quarantines = _table(
    "quarantines",
    _id(),
    _to("candidates"),
    *_texts("digest"),  # of the build: the same source with other knobs is quarantined too
    *_texts("hw_id", "op", "driver", "cause", "reason", "evidence", "created_at"),
)
Index(None, quarantines.c.hw_id, quarantines.c.op)
releases = _table(
    "releases",
    Column("quarantine_id", Integer, ForeignKey("quarantines.id"), primary_key=True),
    *_texts("reason", "created_at"),
)

# The lifetime error budget of a key: each attempt at a promotion debits its false-promotion probability.
debits = _table(
    "debits",
    _id(),
    *_texts("key"),
    Column("amount", REAL64, nullable=False),
    *_texts("reason", "created_at"),
    CheckConstraint("amount > 0 AND amount <= 1", name="amount"),
)
Index(None, debits.c.key)

# A/A sessions: did a clone of the baseline "beat" the baseline? They calibrate pi for a device and time class.
aa_sessions = _table(
    "aa_sessions",
    _id(),
    *_texts("hw_id", "time_class"),
    Column("crossed", Integer, nullable=False),
    *_texts("created_at"),
    CheckConstraint("crossed IN (0, 1)", name="crossed"),
)
Index(None, aa_sessions.c.hw_id, aa_sessions.c.time_class)

HISTORY = tuple(name for name in METADATA.tables if name != "serving")
