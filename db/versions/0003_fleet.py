"""Hosts: who decided, who proved, whose trial it was. On a server, a word to all who listen when what serves changes.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autosel.ledger.migrate import append_only

revision = "0003"
down_revision = "0002"

MADE_SOMEWHERE = ("decisions", "parities", "trials")


def upgrade() -> None:
    op.create_table(
        "hosts",
        sa.Column("id", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("host", "name", "created_at")),
        sa.PrimaryKeyConstraint("id", name="pk_hosts"),
        sa.UniqueConstraint("host", name="uq_hosts_host"),
        sqlite_strict=True,
    )
    append_only("hosts")
    for table in MADE_SOMEWHERE:
        op.execute(f"ALTER TABLE {table} ADD COLUMN host_id INTEGER REFERENCES hosts (id)")
    if op.get_bind().dialect.name != "sqlite":
        tell_of_changes()


def tell_of_changes() -> None:
    op.execute(
        "CREATE FUNCTION autosel_tell() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_notify('autosel_serving', ''); RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER serving_tells AFTER INSERT OR UPDATE OR DELETE ON serving "
        "FOR EACH STATEMENT EXECUTE FUNCTION autosel_tell()"
    )
