"""Leases: the fencing epochs of tuners; and with each trial the boot it ran in.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autosel.ledger.migrate import append_only

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
    append_only("leases")
