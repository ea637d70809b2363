"""Put a backup in the place of a damaged ledger: checked first, and what was there is kept beside it."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from autosel import files
from autosel.errors import LedgerError
from autosel.ledger.engine import BUSY_S, private_folder
from autosel.ledger.locks import write_lock
from autosel.ledger.store import open_ledger

BESIDE = ("", "-wal", "-shm")  # what SQLite keeps under a database's name


def restore(backup: Path, target: Path) -> Path | None:
    """Replace the ledger file `target` by `backup`; where the old one lies now, if there was one.

    Raises LedgerError, with the ledger as it was, if the backup is not a whole ledger of a version we know.
    """
    private_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".restoring-") as folder:
        copy = Path(folder) / "ledger.db"
        _copy(backup, copy)
        with open_ledger(home=Path(folder)) as ledger:  # checks it, and brings it to this version's schema
            ledger.check()
        with write_lock(target, deadline_s=BUSY_S):
            aside = _set_aside(target)
            copy.replace(target)
    return aside


def _copy(backup: Path, copy: Path) -> None:
    """Only the database file: a backup is whole without a log beside it."""
    try:
        with files.opened(backup) as source, copy.open("xb") as target:
            if not source.read(16).startswith(b"SQLite format 3"):
                raise LedgerError(f"{backup} is not a backup of a ledger", why="it is no SQLite database")
            copy.chmod(0o600)
            source.seek(0)
            shutil.copyfileobj(source, target)
    except OSError as error:
        raise LedgerError(f"cannot copy {backup}", why=error.strerror or str(error)) from error


def _set_aside(target: Path) -> Path | None:
    aside = target.with_name(f"{target.name}.replaced-{datetime.now(UTC):%Y%m%dT%H%M%S}")
    if not target.exists():
        return None
    for ending in BESIDE:
        with suppress(FileNotFoundError):
            Path(f"{target}{ending}").rename(f"{aside}{ending}")
    return aside
