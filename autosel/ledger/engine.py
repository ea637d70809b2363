"""Connect to the ledger's database, with the durability and transactions that the ledger needs, not the driver's.

SQLite: WAL, synchronous=FULL, foreign keys, trusted_schema=OFF, and an explicit BEGIN: by default the driver starts no
transaction before DDL, so that a rolled-back migration would leave its tables (research/reliability.md section 4).
PostgreSQL: `server`.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event, exc
from sqlalchemy.pool import NullPool

from autosel import files, settings
from autosel.errors import LedgerError
from autosel.ledger import server
from autosel.ledger.locks import InUseError, KeptLock, write_lock

BUSY_S = 10.0  # a writing transaction takes milliseconds; after this time a waiting writer gets an error
OPEN_S = 0.2  # opening, usually only to read, does not wait for a writer
OLDEST_SQLITE = (3, 37, 0)  # STRICT tables
NOT_PERMITTED = (errno.EROFS, errno.EACCES, errno.EPERM)
INDEX_BYTES = 32 << 10  # minimum size of a write-ahead log's index (-shm); a smaller one could not be created


class Database:
    """Open the ledger's database by URL. `path` is its file, or None for a server; `writable` was found on opening."""

    def __init__(self, url: str) -> None:
        self.url = _parse(url)
        self.path = _file(self.url)
        self.writable = True
        self.immutable = False  # no process writes it, and its log is empty
        self.alone = False  # the log's index is in memory, which reserves the file for this process
        self._failure: LedgerError | None = None
        self._lock: KeptLock | None = None  # the lock, if the connection is kept open
        self._kept: Connection | None = None  # the writing connection, if it is kept open
        self._kept_at: tuple[int, int] | None = None
        self._open = threading.local()  # .connection: this thread's transaction within `together`
        self.engine = self._sqlite_engine() if self.path else server.engine(self.url)

    @property
    def shared(self) -> bool:
        """Return True if other hosts read and write it too."""
        return self.path is None

    @property
    def name(self) -> str:
        return str(self.path) if self.path else self.url.render_as_string(hide_password=True)

    def find_access(self) -> None:
        """Find out how it can be opened: for a file, by starting and ending a write transaction. On a full disk, as in
        a read-only folder, it is opened for reading."""
        if self.path is None:
            with self.reading() as connection:
                self.writable = server.may_write(connection)
            return
        try:
            with self.writing(patience_s=OPEN_S):
                pass
        except InUseError:  # another process is writing
            self.writable = os.access(self.path, os.W_OK)
        except LedgerError as error:
            code = _code(error.__cause__) if isinstance(error.__cause__, exc.DBAPIError) else 0
            refused = isinstance(error.__cause__, OSError) and error.__cause__.errno in NOT_PERMITTED  # the lock's file
            read_only_here = refused or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
            if not read_only_here and not lost(error):
                raise
            self.writable = False
            log, index = (_size(Path(f"{self.path}{ending}")) for ending in ("-wal", "-shm"))
            # no process has the log open, and this one has no space, or no permission, to create its index
            if index < INDEX_BYTES:
                self.immutable = read_only_here or not log
                self.alone = not self.immutable

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open one consistent view. Raises LedgerError."""
        inside = self._inside()
        if inside is not None:
            yield inside
            return
        with self._explained(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, *, patience_s: float | None = None) -> Iterator[Connection]:
        """Run one transaction; it is committed and on disk on leaving. Raises LedgerError, and then nothing is stored.

        After a failed write or fsync this object writes nothing more, because a second fsync may lie. Within `together`
        it belongs to that transaction, and is on disk when that ends.
        """
        inside = self._inside()
        if inside is not None:
            with self._explained():
                yield inside
            return
        if self._failure is not None:
            raise self._failure
        if not self.writable:
            raise read_only(self.name)
        try:
            patience_s = BUSY_S if patience_s is None else patience_s
            with self._serial(patience_s), self._explained(), self._line() as connection:
                with connection.begin():
                    yield connection
                if connection is not self._kept:
                    self._checkpoint(connection)
        except LedgerError as error:
            if lost(error) and self.path is not None:  # a server handles its own disk faults, and recovers
                self._failure = error
            raise

    def keep_line(self) -> None:
        """Keep the writing connection, and its lock's file, open between transactions. A file is then opened once, and
        its log is moved into it only by `move_log`, not at each commit. For one thread alone."""
        if self.path is not None:
            self._lock = KeptLock(self.path)

    def move_log(self) -> None:
        """Move committed writes from the log into the file, if the connection is kept open."""
        with suppress(LedgerError), self._serial(OPEN_S):
            if self._kept is not None:
                self._checkpoint(self._kept)

    @contextmanager
    def _line(self) -> Iterator[Connection]:
        """Return a connection to write through; under the writers' lock."""
        writer = self.engine.execution_options(autosel_write=True)
        place = self._place() if self._lock else None
        if place is None:  # not kept: a server's connections are in a pool, and a file may be gone
            with writer.connect() as connection:
                yield connection
            return
        if self._kept is None or self._kept_at != place:  # a backup has replaced it
            self._let_go()
            self._kept, self._kept_at = writer.connect(), place
        try:
            yield self._kept
        except BaseException:
            self._let_go()
            raise

    def _place(self) -> tuple[int, int] | None:
        """Identify the file, whatever its name."""
        try:
            found = self.path.stat() if self.path else None
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if found else None

    def _let_go(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            with suppress(exc.DBAPIError):
                kept.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Group commits: everything that this thread writes inside is one transaction. Raises LedgerError, and then
        nothing of it is stored."""
        with self.writing() as connection:
            self._open.connection = connection
            try:
                yield
            finally:
                self._open.connection = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Write all or nothing of a part within `together`: if it raises, its writes are undone."""
        inside = self._inside()
        assert inside is not None
        with self._explained(), inside.begin_nested():
            yield

    def _inside(self) -> Connection | None:
        found: Connection | None = getattr(self._open, "connection", None)
        return found

    @property
    def failed(self) -> bool:
        """Return True if a write or an fsync failed. Then nothing more is written, and reading continues."""
        return self._failure is not None

    @contextmanager
    def _serial(self, patience_s: float) -> Iterator[None]:
        """Serialise writers and checkpoints of SQLite. This also removes the precondition of the WAL-reset race of
        SQLite before 3.51.3; SQLite's own wait is not a queue and starves under contention."""
        if self.path is None:
            yield
            return
        lock = self._lock.held if self._lock else partial(write_lock, self.path)
        with lock(deadline_s=patience_s):
            yield

    def _checkpoint(self, connection: Connection) -> None:
        """Checkpoint under the writers' lock, never automatically. Writes that it fails to move stay in the log, which
        is on disk."""
        driver = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection):
            with suppress(sqlite3.Error):
                driver.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise explain(error, self.name) from error

    def close(self) -> None:
        if self._kept is not None:  # closing the last connection moves the log into the file, which is a write
            with suppress(LedgerError), self._serial(BUSY_S):
                self._let_go()
        if self._lock is not None:
            self._lock.close()
        self.engine.dispose()

    # --- engines --------------------------------------------------------------------------------------------------

    def _sqlite_engine(self) -> Engine:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise LedgerError(
                f"SQLite {sqlite3.sqlite_version} is too old for the ledger",
                why="it needs STRICT tables, SQLite 3.37",
                todo="use a newer Python build, or give a PostgreSQL URL in AUTOSEL_DB",
            )
        # No pool: a pooled SQLite connection must not survive a fork, and opening one takes 0.3 ms.
        engine = sa.create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        options = "?immutable=1" if self.immutable else "?mode=rw" if self.writable or self.alone else "?mode=ro"
        uri = f"file:{quote(str(self.path))}{options}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("foreign_keys=ON", "recursive_triggers=ON", "trusted_schema=OFF", "mmap_size=0"):
                connection.execute(f"PRAGMA {pragma}")
            if self.alone:
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            if self.writable:
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=0"):
                    connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("autosel_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _parse(url: str) -> sa.URL:
    try:
        return sa.make_url(url)
    except (exc.ArgumentError, ValueError) as error:  # ValueError: a port that is not a number
        raise LedgerError(
            f"not a database URL: {url!r}", why=str(error), todo="for example sqlite:////path/ledger.db"
        ) from error


def _file(url: sa.URL) -> Path | None:
    if url.get_backend_name() != "sqlite":
        return None
    if not url.database or url.database == ":memory:":
        raise LedgerError("the ledger must be a file", why=f"{url} lives in memory", todo="sqlite:////path/ledger.db")
    return Path(url.database).absolute()


# --- files --------------------------------------------------------------------------------------------------------


def private_folder(folder: Path) -> None:
    """Make a folder that only this user can enter. Raises LedgerError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LedgerError(
            f"cannot make {folder}", why=str(error), todo="set AUTOSEL_HOME to a folder you can write"
        ) from error


def refuse_shared(path: Path) -> None:
    """Raise LedgerError if it is not a regular file, or another user could have written it."""
    try:
        with files.opened(path) as file:
            others = files.writers(os.fstat(file.fileno()))
    except PermissionError:
        return  # SQLite reports it
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}", why=error.strerror or str(error)) from error
    if others:
        raise LedgerError(
            f"{path} may have been written by others",
            why=others,
            todo=f"if its content can be trusted: chown {os.getuid()} and chmod 600 {path}",
        )


def _size(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- errors -------------------------------------------------------------------------------------------------------

_IO = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _code(error: exc.DBAPIError) -> int:
    return int(getattr(error.orig, "sqlite_errorcode", 0) or 0) & 0xFF


def lost(error: BaseException) -> bool:
    """Return True if the disk or the server failed, so that the transaction is lost despite its savepoints."""
    cause = error.__cause__
    if not isinstance(cause, exc.OperationalError):
        return False
    return _code(cause) in _IO if _is_sqlite(cause) else server.gone(cause) or server.full(cause)


def _is_sqlite(error: exc.DBAPIError) -> bool:
    return isinstance(error.orig, sqlite3.Error)


def explain(error: exc.DBAPIError, name: str) -> LedgerError:
    """Turn a driver's error into a message that a user can act on."""
    if not _is_sqlite(error):
        return server.explain(error, name)
    code, why = _code(error), str(error.orig)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LedgerError(
            f"the ledger {name} is locked by another process",
            why=why,
            todo="let the other process finish, or end it, then run the command again; nothing was changed",
        )
    if code == sqlite3.SQLITE_READONLY:
        return read_only(name, why)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return corrupt(name, why)
    if code in _IO:
        return LedgerError(
            f"the ledger {name} could not be written",
            why=f"{why}: the disk is full, or a limit or a fault stops writing",
            todo="free some space and run the command again; everything acknowledged is safe",
        )
    return LedgerError(f"the ledger {name} refused", why=why)


def read_only(name: str, why: str = "") -> LedgerError:
    return LedgerError(
        f"the ledger {name} is read-only",
        why=why or "its file or folder cannot be written by this user",
        todo="make it writable, or set AUTOSEL_HOME to a folder of your own; reading still works",
    )


def corrupt(name: str, why: str) -> LedgerError:
    return LedgerError(
        f"the ledger {name} is damaged",
        why=why,
        todo=f"bring back a backup: {settings.spelling()} db restore FILE; until then the snapshot keeps serving",
    )


def newer(name: str, found: str, known: str) -> LedgerError:
    return LedgerError(
        f"the ledger {name} was written by a newer autosel",
        why=f"its schema is {found}; this version knows up to {known}",
        todo="upgrade autosel, or set AUTOSEL_HOME or AUTOSEL_DB to another ledger",
    )
