"""Migrate a database to this version's schema: in one transaction, after a backup, and never back from a newer one.

Alembic is imported only if there is work to do, because that takes a quarter of a second.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel import resources
from autosel.errors import LedgerError
from autosel.ledger.engine import Database, corrupt, newer, read_only
from autosel.ledger.schema import HEAD

if TYPE_CHECKING:
    from alembic.config import Config


def revision(connection: Connection) -> str:
    """Return the database's schema revision, or "" for an empty one. Raises LedgerError if it is another program's."""
    names = set(sa.inspect(connection).get_table_names())
    if not names:
        return ""
    if "alembic_version" not in names:
        raise LedgerError(
            "this database is not a ledger",
            why=f"it holds {', '.join(sorted(names)[:5])} and no schema revision",
            todo="point AUTOSEL_DB at another database",
        )
    found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    return str(found or "")


def upgrade(database: Database) -> None:
    """Create or migrate, if needed. Raises LedgerError for a newer schema, or an old one that cannot be written."""
    with database.reading() as connection:
        found = revision(connection)
    if found == HEAD:
        return
    if found and found not in _known():
        raise newer(database.name, found, HEAD)
    if not database.writable:
        raise read_only(database.name, f"its schema {found or '(none)'} must first be brought to {HEAD}")
    if found and database.path is not None:
        backup(database, database.path.with_name(f"{database.path.name}.before-{HEAD}"))
    with database.writing() as connection:
        if revision(connection) != HEAD:  # another process may have been first
            from alembic import command

            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, HEAD)


def _known() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _config() -> Config:
    from alembic.config import Config

    folder = resources.migrations()
    if not (folder / "env.py").is_file():
        raise LedgerError(f"autosel's database migrations are missing from {folder}", todo="reinstall autosel")
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def append_only(table: str) -> None:
    """Refuse UPDATE and DELETE on a table of history, below any code that might try; for a running migration."""
    from alembic import op

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


def check(database: Database, *, deep: bool = False) -> None:
    """Raise LedgerError if SQLite finds damage. `deep` also checks every index against its table."""
    if database.path is None:
        return
    with database.reading() as connection:
        found = connection.exec_driver_sql("PRAGMA integrity_check" if deep else "PRAGMA quick_check").scalars().all()
        if found != ["ok"]:
            raise corrupt(database.name, "; ".join(str(line) for line in found[:3]))
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall() if deep else []
    if broken:
        raise corrupt(database.name, f"{len(broken)} rows refer to rows that are not there, first in {broken[0][0]}")


def backup(database: Database, target: Path) -> None:
    """Make a consistent copy while others read and write. Raises LedgerError."""
    if database.path is None:
        raise LedgerError("a server's ledger is backed up with its own tools", todo=f"pg_dump {database.name}")
    making = target.with_name(target.name + ".making")
    try:
        making.unlink(missing_ok=True)
        with database.reading() as connection:
            source = connection.connection.driver_connection
            assert isinstance(source, sqlite3.Connection)
            copy = sqlite3.connect(making)
            try:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # one file, complete without a -wal file
            finally:
                copy.close()
        making.chmod(0o600)
        making.replace(target)
    except (OSError, sqlite3.Error) as error:
        making.unlink(missing_ok=True)
        raise LedgerError(
            f"cannot write the backup {target}", why=str(error), todo="free some space, or choose another folder"
        ) from error
