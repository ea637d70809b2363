"""The ledger: append-only history and one mutable table, `serving`.

Revision ID: 0001
Revises: None
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.sqlite import REAL

from autosel.ledger.migrate import append_only

revision = "0001"
down_revision = None

HISTORY = (
    "fingerprints",
    "workloads",
    "candidates",
    "parities",
    "races",
    "verdicts",
    "decisions",
    "decision_parities",
    "trials",
    "trial_ends",
    "quarantines",
    "releases",
    "debits",
    "aa_sessions",
)


def texts(*names: str) -> Iterator[sa.Column[str]]:
    return (sa.Column(name, sa.Text, nullable=False) for name in names)


def integers(*names: str, required: bool = True) -> Iterator[sa.Column[int]]:
    return (sa.Column(name, sa.Integer, nullable=not required) for name in names)


def create(table: str, *items: sa.schema.SchemaItem, key: tuple[str, ...] = ("id",)) -> None:
    first = integers("id") if key == ("id",) else ()
    op.create_table(table, *first, *items, sa.PrimaryKeyConstraint(*key, name=f"pk_{table}"), sqlite_strict=True)


def refers(table: str, **columns: str) -> Iterator[sa.ForeignKeyConstraint]:
    """Let columns refer to the ids of other tables."""
    for column, target in columns.items():
        yield sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}")


def unique(table: str, column: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(column, name=f"uq_{table}_{column}")


def holds(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def index(table: str, *columns: str) -> None:
    op.create_index(f"ix_{table}_{'_'.join(columns)}", table, columns)


def upgrade() -> None:
    create_evidence()
    create_decisions()
    create_containment()
    create_budgets()
    make_append_only()


def create_evidence() -> None:
    create(
        "fingerprints",
        *texts("hw_id", "env_id", "digest", "document", "created_at"),
        unique("fingerprints", "digest"),
    )
    create("workloads", *texts("key", "op", "bucket", "document"), unique("workloads", "key"))
    create(
        "candidates",
        *texts("name", "backend", "digest", "document_digest", "document"),
        unique("candidates", "document_digest"),
        holds("candidates", "digest_given", "length(digest) > 0"),
    )
    create(
        "parities",
        *integers("candidate_id", "workload_id"),
        *texts("hw_id", "scope", "outcome", "document", "created_at"),
        *refers("parities", candidate_id="candidates", workload_id="workloads"),
        holds("parities", "outcome", "outcome IN ('passed', 'failed')"),
    )
    index("parities", "scope", "hw_id")
    create(
        "races",
        *integers("workload_id", "fingerprint_id"),
        *texts("digest"),
        sa.Column("document", sa.LargeBinary, nullable=False),
        *texts("created_at"),
        *refers("races", workload_id="workloads", fingerprint_id="fingerprints"),
    )
    create(
        "verdicts",
        *integers("race_id", required=False),
        *texts("outcome", "document", "created_at"),
        *refers("verdicts", race_id="races"),
        holds("verdicts", "outcome", "outcome IN ('promote', 'tie', 'lose', 'undecided')"),
    )


def create_decisions() -> None:
    create(
        "decisions",
        *texts("key", "state", "hw_id", "op", "bucket", "mode"),
        *integers("length_from", "length_to", required=False),
        *integers("workload_id"),
        *integers("fingerprint_id", required=False),
        *integers("arm_id", "baseline_id"),
        *integers("race_id", "verdict_id", "previous_id", required=False),
        *texts("entrants", "reason", "idempotency_key", "created_at"),
        *refers("decisions", workload_id="workloads", fingerprint_id="fingerprints"),
        *refers("decisions", arm_id="candidates", baseline_id="candidates"),
        *refers("decisions", race_id="races", verdict_id="verdicts", previous_id="decisions"),
        unique("decisions", "idempotency_key"),
        holds("decisions", "state", "state IN ('promoted', 'kept', 'demoted', 'quarantined', 'pinned')"),
        holds("decisions", "length_range", "(length_from IS NULL) = (length_to IS NULL)"),
        holds("decisions", "length_order", "length_from IS NULL OR length_from BETWEEN 1 AND length_to"),
    )
    index("decisions", "op")
    index("decisions", "hw_id", "bucket", "mode")
    create(
        "decision_parities",
        *integers("decision_id", "parity_id"),
        *refers("decision_parities", decision_id="decisions", parity_id="parities"),
        key=("decision_id", "parity_id"),
    )
    create(
        "serving",
        *texts("key"),
        *integers("decision_id", "epoch"),
        *refers("serving", decision_id="decisions"),
        unique("serving", "epoch"),
        holds("serving", "epoch", "epoch > 0"),
        key=("key",),
    )


def create_containment() -> None:
    create(
        "trials",
        *integers("candidate_id"),
        *texts("hw_id", "op", "stage", "created_at"),
        *refers("trials", candidate_id="candidates"),
        holds("trials", "stage", "stage IN ('worker', 'client')"),
    )
    create(
        "trial_ends",
        *integers("trial_id"),
        *texts("outcome", "created_at"),
        *refers("trial_ends", trial_id="trials"),
        key=("trial_id",),
    )
    create(
        "quarantines",
        *integers("candidate_id"),
        *texts("digest", "hw_id", "op", "driver", "cause", "reason", "evidence", "created_at"),
        *refers("quarantines", candidate_id="candidates"),
    )
    index("quarantines", "hw_id", "op")
    create(
        "releases",
        *integers("quarantine_id"),
        *texts("reason", "created_at"),
        *refers("releases", quarantine_id="quarantines"),
        key=("quarantine_id",),
    )


def create_budgets() -> None:
    real = sa.Double().with_variant(REAL(), "sqlite")
    create(
        "debits",
        *texts("key"),
        sa.Column("amount", real, nullable=False),
        *texts("reason", "created_at"),
        holds("debits", "amount", "amount > 0 AND amount <= 1"),
    )
    index("debits", "key")
    create(
        "aa_sessions",
        *texts("hw_id", "time_class"),
        *integers("crossed"),
        *texts("created_at"),
        holds("aa_sessions", "crossed", "crossed IN (0, 1)"),
    )
    index("aa_sessions", "hw_id", "time_class")


def make_append_only() -> None:
    if op.get_bind().dialect.name != "sqlite":
        op.execute(
            "CREATE FUNCTION autosel_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION '% is history: append only', TG_TABLE_NAME; END $$"
        )
    for table in HISTORY:
        append_only(table)
