"""Keep a ledger on a PostgreSQL server: connections, transactions, error messages, locks that end with their holder,
and notifications of others' decisions.

Writers are serialised by an advisory lock that each writing transaction takes. A lease on a device is a session's
advisory lock, released when its holder's connection ends. Correctness does not depend on these locks: the epoch of its
lease refuses a stale holder (`store`).
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
CHANNEL = "autosel_serving"  # sent by a trigger of the migration, at each commit that changes the serving decisions
CONNECT_S = 5
LOCK_S = 10
WRITER_LOCK = 0x6175746F73656C  # "autosel": the advisory lock of writers
GONE = ("08", "57P", "XX")  # connection exceptions, an operator's shutdown or a crash, internal errors
FULL = ("53100", "58030")  # disk full, an I/O error
FORBIDDEN = ("25006", "42501", "3F000")  # a read-only transaction (a standby), no privilege, not even to see the schema


def engine(url: sa.URL) -> Engine:
    """Connect to the server. Raises LedgerError if it is not PostgreSQL, or if its driver is not installed."""
    if url.get_backend_name() != "postgresql":
        raise LedgerError(
            f"a ledger cannot live in {url.get_backend_name()}",
            why="SQLite and PostgreSQL are supported",
            todo=f"for example {DRIVER}://user@host/autosel",
        )
    given = url.query.get("options", "")
    options = f"{given if isinstance(given, str) else ' '.join(given)} -c lock_timeout={LOCK_S}s"
    if "synchronous_commit" not in options:  # acknowledged decisions survive a crash, whatever the server's default
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
    """Begin a transaction. A writer waits for its turn and sees the previous commit; a reader sees one moment."""
    options = connection.get_execution_options()
    if options.get("autosel_line", False):
        return
    if options.get("autosel_write", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")
    else:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


def may_write(connection: Connection) -> bool:
    """Return True if this role may record decisions, on a server that accepts writes."""
    asked = "SELECT has_table_privilege('decisions', 'INSERT') AND NOT pg_is_in_recovery()"
    return bool(connection.exec_driver_sql(asked).scalar())


# --- errors -------------------------------------------------------------------------------------------------------


def state_of(error: exc.DBAPIError) -> str:
    """Return PostgreSQL's five-character error code; empty if there is none."""
    return str(getattr(error.orig, "sqlstate", None) or "")


def gone(error: exc.DBAPIError) -> bool:
    """Return True if the server or the connection ended. Then it is unknown whether a running commit was carried
    out."""
    state = state_of(error)
    return isinstance(error, exc.OperationalError) and (not state or state.startswith(GONE))


def full(error: exc.DBAPIError) -> bool:
    return state_of(error) in FULL


def explain(error: exc.DBAPIError, name: str) -> LedgerError:
    """Turn a server's error into a message that a user can act on."""
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
            f"the ledger {name} could not be written", why=why, todo="check the server's disk; nothing was changed"
        )
    if gone(error):
        return LedgerError(
            f"the server of the ledger {name} does not answer",
            why=why,
            todo="start it, or check the network, then run the command again: acknowledged writes are safe, and a "
            "repeated write is stored once; best() continues with its snapshot",
        )
    return LedgerError(f"the ledger {name} refused", why=why)


# --- locks --------------------------------------------------------------------------------------------------------


@contextmanager
def session_lock(connected: Engine, name: str, what: str) -> Iterator[None]:
    """Hold `name` on the server while this process and its connection live. Raises InUseError at once if another
    process holds it.

    If the server ends, so does the lock; the epoch of the lease then decides whose writes count.
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
            with suppress(exc.DBAPIError):  # the server is gone, and the lock with it
                line.exec_driver_sql(f"SELECT pg_advisory_unlock({key})")


_HOLDER = """
SELECT coalesce(host(a.client_addr), 'this machine') || ', server process ' || l.pid
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objid = %s AND l.classid = %s AND l.objsubid = 1 LIMIT 1
"""


# --- news ---------------------------------------------------------------------------------------------------------


async def changes(url: sa.URL) -> AsyncIterator[None]:
    """Yield once when listening starts, then at every commit, of any host, that changed the serving decisions. Raises
    LedgerError when the connection breaks."""
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
        raise LedgerError(f"cannot listen to {name}", why=" ".join(str(error).split())[:300]) from error


# --- roles --------------------------------------------------------------------------------------------------------

BY_HAND = ("releases",)  # ending a quarantine is an administrator's right


def grants(role: str, login: str, database: str, schema: str, history: tuple[str, ...]) -> list[str]:
    """Return the statements that make an existing role a reader, tuner or administrator of the ledger. They are
    idempotent, and also revoke the rights that the role should not have.

    A reader sees everything. A tuner also records decisions, proofs and races, as a serving host needs. An admin also
    ends quarantines. None of them can change history: they have only INSERT, and a trigger refuses the owner too.
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
