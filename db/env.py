"""Alembic environment. autosel passes its open connection; `alembic -c db/alembic.ini` uses AUTOSEL_DB."""

from __future__ import annotations

from contextlib import nullcontext

from alembic import context

from autosel import settings
from autosel.ledger.engine import Database
from autosel.ledger.schema import METADATA

given = context.config.attributes.get("connection")
with nullcontext(given) if given is not None else Database(settings.db_url()).writing() as connection:
    context.configure(connection=connection, target_metadata=METADATA, transactional_ddl=True)
    context.run_migrations()  # inside the transaction of the caller, if it passes a connection
