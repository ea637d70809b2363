"""The ledger: append-only history and one mutable table, `serving`.

Revision ID: 0001
Revises: None
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.sqlite import REAL

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


def text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def integer(name: str, *, required: bool = True) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=not required)


def create(table: str, *items: sa.schema.SchemaItem, key: tuple[str, ...] = ("id",)) -> None:
    first = [integer("id")] if key == ("id",) else []
    op.create_table(table, *first, *items, sa.PrimaryKeyConstraint(*key, name=f"pk_{table}"), sqlite_strict=True)


def refers(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}")


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
        text("hw_id"),
        text("env_id"),
        text("digest"),
        text("document"),
        text("created_at"),
        unique("fingerprints", "digest"),
    )
    create("workloads", text("key"), text("op"), text("bucket"), text("document"), unique("workloads", "key"))
    create(
        "candidates",
        text("name"),
        text("backend"),
        text("digest"),
        text("document_digest"),
        text("document"),
        unique("candidates", "document_digest"),
        holds("candidates", "digest_given", "length(digest) > 0"),
    )
    create(
        "parities",
        integer("candidate_id"),
        integer("workload_id"),
        text("hw_id"),
        text("scope"),
        text("outcome"),
        text("document"),
        text("created_at"),
        refers("parities", "candidate_id", "candidates"),
        refers("parities", "workload_id", "workloads"),
        holds("parities", "outcome", "outcome IN ('passed', 'failed')"),
    )
    index("parities", "scope", "hw_id")
    create(
        "races",
        integer("workload_id"),
        integer("fingerprint_id"),
        text("digest"),
        sa.Column("document", sa.LargeBinary, nullable=False),
        text("created_at"),
        refers("races", "workload_id", "workloads"),
        refers("races", "fingerprint_id", "fingerprints"),
    )
    create(
        "verdicts",
        integer("race_id", required=False),
        text("outcome"),
        text("document"),
        text("created_at"),
        refers("verdicts", "race_id", "races"),
        holds("verdicts", "outcome", "outcome IN ('promote', 'tie', 'lose', 'undecided')"),
    )


def create_decisions() -> None:
    create(
        "decisions",
        text("key"),
        text("state"),
        text("hw_id"),
        text("op"),
        text("bucket"),
        text("mode"),
        integer("length_from", required=False),
        integer("length_to", required=False),
        integer("workload_id"),
        integer("fingerprint_id", required=False),
        integer("arm_id"),
        integer("baseline_id"),
        integer("race_id", required=False),
        integer("verdict_id", required=False),
        integer("previous_id", required=False),
        text("entrants"),
        text("reason"),
        text("idempotency_key"),
        text("created_at"),
        refers("decisions", "workload_id", "workloads"),
        refers("decisions", "fingerprint_id", "fingerprints"),
        refers("decisions", "arm_id", "candidates"),
        refers("decisions", "baseline_id", "candidates"),
        refers("decisions", "race_id", "races"),
        refers("decisions", "verdict_id", "verdicts"),
        refers("decisions", "previous_id", "decisions"),
        unique("decisions", "idempotency_key"),
        holds("decisions", "state", "state IN ('promoted', 'kept', 'demoted', 'quarantined', 'pinned')"),
        holds("decisions", "length_range", "(length_from IS NULL) = (length_to IS NULL)"),
        holds("decisions", "length_order", "length_from IS NULL OR length_from BETWEEN 1 AND length_to"),
    )
    index("decisions", "op")
    index("decisions", "hw_id", "bucket", "mode")
    create(
        "decision_parities",
        integer("decision_id"),
        integer("parity_id"),
        refers("decision_parities", "decision_id", "decisions"),
        refers("decision_parities", "parity_id", "parities"),
        key=("decision_id", "parity_id"),
    )
    create(
        "serving",
        text("key"),
        integer("decision_id"),
        integer("epoch"),
        refers("serving", "decision_id", "decisions"),
        unique("serving", "epoch"),
        holds("serving", "epoch", "epoch > 0"),
        key=("key",),
    )


def create_containment() -> None:
    create(
        "trials",
        integer("candidate_id"),
        text("hw_id"),
        text("op"),
        text("stage"),
        text("created_at"),
        refers("trials", "candidate_id", "candidates"),
        holds("trials", "stage", "stage IN ('worker', 'client')"),
    )
    create(
        "trial_ends",
        integer("trial_id"),
        text("outcome"),
        text("created_at"),
        refers("trial_ends", "trial_id", "trials"),
        key=("trial_id",),
    )
    create(
        "quarantines",
        integer("candidate_id"),
        text("digest"),
        text("hw_id"),
        text("op"),
        text("driver"),
        text("cause"),
        text("reason"),
        text("evidence"),
        text("created_at"),
        refers("quarantines", "candidate_id", "candidates"),
    )
    index("quarantines", "hw_id", "op")
    create(
        "releases",
        integer("quarantine_id"),
        text("reason"),
        text("created_at"),
        refers("releases", "quarantine_id", "quarantines"),
        key=("quarantine_id",),
    )


def create_budgets() -> None:
    real = sa.Double().with_variant(REAL(), "sqlite")
    create(
        "debits",
        text("key"),
        sa.Column("amount", real, nullable=False),
        text("reason"),
        text("created_at"),
        holds("debits", "amount", "amount > 0 AND amount <= 1"),
    )
    index("debits", "key")
    create(
        "aa_sessions",
        text("hw_id"),
        text("time_class"),
        integer("crossed"),
        text("created_at"),
        holds("aa_sessions", "crossed", "crossed IN (0, 1)"),
    )
    index("aa_sessions", "hw_id", "time_class")


def make_append_only() -> None:
    """Refuse UPDATE and DELETE on history, below any code that might try."""
    if op.get_bind().dialect.name == "sqlite":
        for table in HISTORY:
            for verb in ("UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is history: append only'); END"
                )
        return
    op.execute(
        "CREATE FUNCTION autosel_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is history: append only', TG_TABLE_NAME; END $$"
    )
    for table in HISTORY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION autosel_refuse()"
        )
