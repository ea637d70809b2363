"""A ledger on a PostgreSQL server: its connections and transactions, its errors in words, locks that end with their
holder, and word of what others decide.

Writers are one at a time, by an advisory lock that each writing transaction takes; a lease on a device is a session's
advisory lock, free the moment its holder's connection ends. Neither makes anything correct by itself: a stale holder is
refused by the epoch of its lease (`store`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event, exc

from autosel import extras, settings
from autosel.errors import LedgerError
from autosel.ledger.locks import InUseError

DRIVER = "postgresql+psycopg"
CHANNEL = "autosel_serving"  # told by a trigger of the migration, at each commit that changes what serves
CONNECT_S = 5
LOCK_S = 10
WRITER_LOCK = 0x6175746F73656C  # "autosel": the advisory lock of writers
GONE = ("08", "57P", "XX")  # connection exceptions, an operator's shutdown or a crash, internal errors
FULL = ("53100", "58030")  # disk full, an I/O error
FORBIDDEN = ("25006", "42501", "3F000")  # a read-only transaction (a standby), no privilege, not even to see the schema


def engine(url: sa.URL) -> Engine:
    """Raises LedgerError for a server that is not PostgreSQL, or where its driver is not installed."""
    if url.get_backend_name() != "postgresql":
        raise LedgerError(
            f"a ledger cannot live in {url.get_backend_name()}",
            why="SQLite and PostgreSQL are what it was written for",
            todo=f"for example {DRIVER}://user@host/autosel",
        )
    given = url.query.get("options", "")
    options = f"{given if isinstance(given, str) else ' '.join(given)} -c lock_timeout={LOCK_S}s"
    if "synchronous_commit" not in options:  # an acknowledged decision survives a crash, whatever the server's default
        options += " -c synchronous_commit=on"
    arguments = {
        "connect_timeout": CONNECT_S,
        "client_encoding": "utf8",
        "application_name": "autosel",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "options": options.strip(),
    }
    try:
        made = sa.create_engine(url.set(drivername=DRIVER), pool_pre_ping=True, connect_args=arguments)
    except ModuleNotFoundError as error:
        lacks = extras.missing("fleet", f"the ledger {url.render_as_string(hide_password=True)}", error)
        raise LedgerError(lacks.what, why=lacks.why, todo=lacks.todo) from error
    except exc.ArgumentError as error:
        raise LedgerError(f"no driver for {url.render_as_string(hide_password=True)}", why=str(error)) from error
    event.listen(made, "begin", _begin)
    return made


def _begin(connection: Connection) -> None:
    """A writer waits for its turn, and sees what the one before has committed; a reader sees one moment."""
    options = connection.get_execution_options()
    if options.get("autosel_line", False):
        return
    if options.get("autosel_write", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")
    else:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


def may_write(connection: Connection) -> bool:
    """Is this role allowed to record decisions, on a server that takes writes?"""
    asked = "SELECT has_table_privilege('decisions', 'INSERT') AND NOT pg_is_in_recovery()"
    return bool(connection.exec_driver_sql(asked).scalar())


# --- errors -------------------------------------------------------------------------------------------------------


def state_of(error: exc.DBAPIError) -> str:
    """The five characters by which PostgreSQL names an error; empty where none came back."""
    return str(getattr(error.orig, "sqlstate", None) or "")


def gone(error: exc.DBAPIError) -> bool:
    """Did the server, or the line to it, end? Then nobody can say whether a commit under way was carried out."""
    state = state_of(error)
    return isinstance(error, exc.OperationalError) and (not state or state.startswith(GONE))


def full(error: exc.DBAPIError) -> bool:
    return state_of(error) in FULL


def explain(error: exc.DBAPIError, name: str) -> LedgerError:
    """A server's error in words a user can act on."""
    why = " ".join(str(error.orig).split())[:300]
    state = state_of(error)
    if state in FORBIDDEN:
        todo = f"an administrator may allow it: {settings.spelling()} db grant tuner ROLE"
        return LedgerError(f"the ledger {name} does not let this role do that", why=why, todo=todo)
    if state == "55P03":
        return LedgerError(
            f"the ledger {name} is locked by another process",
            why=f"waited {LOCK_S} s: {why}",
            todo="let the other process finish, then run the command again; nothing was changed",
        )
    if full(error):
        return LedgerError(
            f"the ledger {name} could not be written", why=why, todo="see to the server's disk; nothing was changed"
        )
    if gone(error):
        return LedgerError(
            f"the server of the ledger {name} does not answer",
            why=why,
            todo="start it, or see that it can be reached, then run the command again: what was acknowledged is safe, "
            "and what was under way is stored once however often it is repeated; best() goes on with its snapshot",
        )
    return LedgerError(f"the ledger {name} refused", why=why)


# --- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def session_lock(connected: Engine, name: str, what: str) -> Iterator[None]:
    """Hold `name` on the server for as long as this process, and its line to the server, live. Raises InUseError at
    once where another holds it.

    Where the server ends meanwhile, so does the lock: the epoch of the lease then decides whose writes count.
    """
    key = int.from_bytes(sha256(name.encode()).digest()[:8], "big", signed=True)
    with connected.execution_options(isolation_level="AUTOCOMMIT", autosel_line=True).connect() as line:
        if not line.exec_driver_sql(f"SELECT pg_try_advisory_lock({key})").scalar():
            holder = line.exec_driver_sql(_HOLDER, (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)).scalar()
            raise InUseError(
                f"{what} is in use by another process",
                why=f"held by {holder or 'another host'}",
                todo="let it finish, or end it; its lock ends with it",
            )
        try:
            yield
        finally:
            with suppress(exc.DBAPIError):  # the server went away, and the lock with it
                line.exec_driver_sql(f"SELECT pg_advisory_unlock({key})")


_HOLDER = """
SELECT coalesce(host(a.client_addr), 'this machine') || ', server process ' || l.pid
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objid = %s AND l.classid = %s AND l.objsubid = 1 LIMIT 1
"""


# --- news ---------------------------------------------------------------------------------------------------------


async def changes(url: sa.URL) -> AsyncIterator[None]:
    """Yields once when it listens, then at every commit, of whichever host, that changed what serves. Raises
    LedgerError when the line to the server breaks."""
    import psycopg

    name = url.render_as_string(hide_password=True)
    where = {**url.query, **url.translate_connect_args(database="dbname", username="user")}
    own: dict[str, Any] = {"connect_timeout": CONNECT_S, "keepalives_idle": 10, "application_name": "autosel listener"}
    try:
        line: Any = await psycopg.AsyncConnection.connect(autocommit=True, **{**where, **own})
        async with line:
            await line.execute(f"LISTEN {CHANNEL}")
            yield
            async for _ in line.notifies():
                yield
    except psycopg.Error as error:
        raise LedgerError(f"nothing is heard from {name}", why=" ".join(str(error).split())[:300]) from error


# --- roles --------------------------------------------------------------------------------------------------------

BY_HAND = ("releases",)  # ending a quarantine is an administrator's


def grants(role: str, login: str, database: str, schema: str, history: tuple[str, ...]) -> list[str]:
    """The statements that make an existing role a reader, tuner or administrator of the ledger; running them twice is
    running them once, and each role takes back what it does not have.

    reader  sees everything. tuner  also records decisions, proofs and races: what a host that serves needs. admin
    also ends quarantines. History can be changed by none of them: INSERT is all they have, below a trigger that
    refuses the owner too.
    """
    to, into = _quoted(login), _quoted(schema)
    tables = [f"{into}.{_quoted(name)}" for name in history]
    taken = [f"{into}.{_quoted(name)}" for name in BY_HAND] if role == "tuner" else []
    made = [
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {into} FROM {to}",
        f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA {into} FROM {to}",
        f"GRANT CONNECT ON DATABASE {_quoted(database)} TO {to}",
        f"GRANT USAGE ON SCHEMA {into} TO {to}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {into} TO {to}",
    ]
    if role != "reader":
        made += [
            f"GRANT INSERT ON {', '.join(t for t in tables if t not in taken)} TO {to}",
            f"GRANT INSERT, UPDATE, DELETE ON {into}.serving TO {to}",
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {into} TO {to}",
        ]
    return made


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
