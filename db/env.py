"""Alembic environment. autosel passes its open connection; `alembic -c db/alembic.ini` uses AUTOSEL_DB."""

from __future__ import annotations

from alembic import context

from autosel.ledger.schema import METADATA


def main() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        context.configure(connection=connection, target_metadata=METADATA, transactional_ddl=True)
        context.run_migrations()  # inside the caller's transaction
        return
    from autosel import settings
    from autosel.ledger.engine import Database

    with Database(settings.db_url()).writing() as opened:
        context.configure(connection=opened, target_metadata=METADATA, transactional_ddl=True)
        context.run_migrations()


main()
