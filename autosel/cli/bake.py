"""`export --bake`: decisions, their builds and a lock as one folder for an image, which serves read-only.

    DIR/decisions.json  DIR/autosel.lock  DIR/native/<digest>/  DIR/fingerprint/

The folder is a home: AUTOSEL_HOME names it. It needs no compiler, no network and no write access.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from autosel import ledger as ledgers
from autosel import settings
from autosel.candidates.validity import staleness
from autosel.cli.device import ids_here
from autosel.errors import AutoselError, BadConfig
from autosel.ledger import snapshot
from autosel.ledger.snapshot import Row
from autosel.native.compile import artefacts
from autosel.values import Decision, NativeRecipe

AT_RUN_TIME = ("INDUCTOR", "TRITON")  # backends that compile in the process that serves


@dataclass(frozen=True, slots=True, kw_only=True)
class Baked:
    """Content of the folder; `left` has the decisions that it cannot serve, as (key, reason)."""

    folder: str
    decisions: int
    builds: int
    left: tuple[tuple[str, str], ...]


def bake(folder: Path, ops: Collection[str] = ()) -> Baked:
    """Write the folder completely or not at all. `ops` limits it to decisions of these ops.

    Raises BadConfig if the folder is not empty, AutoselError if no decision can be baked.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig(f"{folder} is not empty", todo="name a folder that does not exist yet")
    rows, left = _portable([row for row in here() if not ops or row.document.get("op") in ops])
    if not rows:
        why = "; ".join(f"{key}: {reason}" for key, reason in left[:3]) or "no decision of this device"
        raise AutoselError("nothing can be baked", why=why, todo=f"{settings.spelling()} tune")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".baking-") as making:
            made = Path(making) / "home"
            builds = _fill(made, rows)
            if folder.exists():
                folder.rmdir()
            made.rename(folder)
    except OSError as error:
        raise BadConfig(f"cannot write {folder}", why=error.strerror or str(error)) from error
    return Baked(folder=str(folder), decisions=len(rows), builds=builds, left=left)


def here() -> Sequence[Row]:
    """Return what serves on this machine's devices, for every number of threads."""
    ids = ids_here()
    with ledgers.open_ledger() as ledger:
        rows = snapshot.validate(ledger.export(), "the ledger").rows
    return [row for row in rows if row.document.get("hw_id") in ids]


def _portable(rows: Sequence[Row]) -> tuple[list[Row], tuple[tuple[str, str], ...]]:
    """Split into the rows that serve from a folder, and the others with the reason."""
    kept: list[Row] = []
    left: list[tuple[str, str]] = []
    for row in rows:
        d = row.decision
        why = _bound_to_here(d) or staleness(d)
        if why:
            left.append((row.key.partition("/")[2], why))
        else:
            kept.append(row)
    return kept, tuple(left)


def _bound_to_here(d: Decision) -> str:
    if d.arm.backend in AT_RUN_TIME:
        return f"{d.arm.candidate} is compiled by the process that serves"
    if not isinstance(d.arm.recipe, NativeRecipe) and d.arm.recipe.path:
        return f"{d.arm.candidate} is in {d.arm.recipe.path}: install it as a package"
    return ""


def _fill(made: Path, rows: Sequence[Row]) -> int:
    """Write the home; return the number of builds."""
    made.mkdir(mode=0o755)
    document = document_of(rows)
    (made / snapshot.FILE).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    (made / "autosel.lock").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    digests = sorted({arm.build for row in rows for arm in (row.decision.arm, row.decision.baseline) if arm.build})
    for digest in digests:
        shutil.copytree(artefacts() / digest, made / "native" / digest)
    measured = settings.home() / "fingerprint"
    if measured.is_dir():
        shutil.copytree(measured, made / "fingerprint", ignore=shutil.ignore_patterns(".*"))
    _open_to_readers(made)
    return len(digests)


def document_of(rows: Sequence[Row]) -> dict[str, object]:
    """Return these rows as a document in the snapshot's format."""
    listed = [{"key": row.key, "epoch": row.epoch, "decision": dict(row.document)} for row in rows]
    return snapshot.document(max(row.epoch for row in rows), listed)


def _open_to_readers(folder: Path) -> None:
    """Let every user of the image read the folder and only the owner write it: `best()` refuses other files."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
