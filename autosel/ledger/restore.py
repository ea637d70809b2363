"""Replace a damaged ledger by a backup: check the backup first, and keep the old file."""

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

BESIDE = ("", "-wal", "-shm")  # suffixes of SQLite's files for a database


def restore(backup: Path, target: Path) -> Path | None:
    """Replace the ledger file `target` by `backup`; return the new path of the old one, if there was one.

    Raises LedgerError, leaving the ledger unchanged, if the backup is not a complete ledger of a known version.
    """
    private_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".restoring-") as folder:
        copy = Path(folder) / "ledger.db"
        _copy(backup, copy)
        with open_ledger(home=Path(folder)) as ledger:  # checks it, and migrates it to this version's schema
            ledger.check()
        with write_lock(target, deadline_s=BUSY_S):
            aside = _set_aside(target)
            copy.replace(target)
    return aside


def _copy(backup: Path, copy: Path) -> None:
    """Copy only the database file: a backup is complete without a log."""
    try:
        with files.opened(backup) as source, copy.open("xb") as target:
            if not source.read(16).startswith(b"SQLite format 3"):
                raise LedgerError(f"{backup} is not a backup of a ledger", why="it is not a SQLite database")
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
