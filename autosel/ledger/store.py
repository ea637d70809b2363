"""Open the ledger of a home: through its daemon, if that answers, else in this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from autosel import settings
from autosel.errors import LedgerError
from autosel.ledger import intake, migrate, remote
from autosel.ledger.engine import OPEN_S, Database, private_folder, refuse_shared
from autosel.ledger.local import Ledger
from autosel.ledger.locks import InUseError
from autosel.ledger.reader import Evidence
from autosel.ledger.serving import Served
from autosel.ledger.transfer import Imported

__all__ = ["Evidence", "Imported", "Ledger", "Served", "open_ledger"]


def open_ledger(url: str | None = None, home: Path | None = None, *, alone: bool = False) -> Ledger:
    """Create, migrate and check the ledger, store the faults seen in service, then publish its decisions.

    If the daemon of this home answers, it writes (unless `alone`), and has done all of that. A ledger that cannot be
    written is opened for reading. Raises LedgerError if it is corrupt, locked, of a newer version, or missing and
    cannot be created.
    """
    home = home or settings.home()
    database = Database(url or (f"sqlite:///{home / 'ledger.db'}" if home != settings.home() else settings.db_url()))
    if not alone:
        through = remote.reach(database, home)
        if through is not None:
            return through
    if database.path is not None:
        _prepare_file(database, database.path)
    ledger = Ledger(database, home)
    migrate.check(database)
    migrate.upgrade(database)
    if database.shared:
        database.find_access()
    if ledger.writable:
        intake.take_in(ledger)
    if ledger.writable or (database.shared and os.access(home, os.W_OK)):
        with suppress(InUseError):  # the process that publishes now, or waits to, includes this
            ledger.publish(patience_s=OPEN_S)
    return ledger


def _prepare_file(database: Database, path: Path) -> None:
    """Create a new private file, or find out whether the existing one can be written."""
    if not path.exists():
        private_folder(path.parent)
        try:
            path.touch(mode=0o600)
        except OSError as error:
            raise LedgerError(
                f"cannot create the ledger {path}", why=str(error), todo="set AUTOSEL_HOME to a folder you can write"
            ) from error
        return
    refuse_shared(path)
    database.find_access()
