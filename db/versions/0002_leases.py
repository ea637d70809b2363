"""Leases: the fencing epochs of tuners; and with each trial the boot it ran in.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("id", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("hw_id", "machine", "holder", "created_at")),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sqlite_strict=True,
    )
    op.create_index("ix_leases_hw_id_machine", "leases", ["hw_id", "machine"])
    op.add_column("trials", sa.Column("boot", sa.Text, nullable=False, server_default=""))
    make_append_only("leases")


def make_append_only(table: str) -> None:
    if op.get_bind().dialect.name != "sqlite":
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION autosel_refuse()"
        )
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is history: append only'); END"
        )
