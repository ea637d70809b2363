"""Read and write the serving snapshot `decisions.json` for `best()`. Imports neither SQLAlchemy nor torch.

    {"digest": ..., "format": "autosel.decisions", "version": 1, "epoch": 7, "rows": [...]}

`digest` is the sha256 of the canonical JSON of the rest. Each row is {"key", "epoch", "decision"}. The file is
replaced, never edited: a reader sees the old one or the new one. Exports and `autosel.lock` have this format too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from autosel import files
from autosel.errors import BadConfig, LedgerError
from autosel.ledger.durable import replace_private
from autosel.ledger.former import modern, modern_key
from autosel.ledger.key import serving_key
from autosel.values import Decision, from_json, parse_json

FORMAT = "autosel.decisions"
VERSION = 1
FILE = "decisions.json"
MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold one served key. `document` is its decision as JSON, decoded only when that op is used."""

    key: str
    epoch: int
    document: Mapping[str, Any]

    @property
    def decision(self) -> Decision:
        """Decode the decision. Raises BadConfig if the document is not a decision, or not the key's."""
        try:
            made: Decision = from_json(Decision, self.document)
        except ValueError as error:
            raise BadConfig(f"the decision of {self.key} cannot be understood", why=str(error)) from error
        key = serving_key(made.hw_id, made.mode, made.bucket, made.length_range)
        if key != self.key or made.op != made.workload.op or made.bucket != made.workload.bucket:
            raise BadConfig(f"the decision of {self.key} is another's", why=f"it says {key}, {made.workload.key}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    epoch: int
    rows: tuple[Row, ...]
    digest: str


def document(epoch: int, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the snapshot as JSON types, with its digest."""
    body = {"format": FORMAT, "version": VERSION, "epoch": epoch, "rows": list(rows)}
    return {"digest": _digest(body), **body}


def _digest(body: Mapping[str, Any]) -> str:
    """Return `values.digest` of data that is JSON already: a snapshot is written at each decision, mostly unchanged."""
    import rfc8785

    return sha256(rfc8785.dumps(body)).hexdigest()


def publish(path: Path, made: Mapping[str, Any]) -> None:
    """Write it unless it is unchanged. Raises LedgerError."""
    text = _text(made).encode()
    try:
        same = files.read(path, len(text)) == text
    except OSError:
        same = False
    if not same:
        write(path, made)


def _text(made: Mapping[str, Any]) -> str:
    return json.dumps(made, separators=(",", ":"), allow_nan=False)


def write(path: Path, made: Mapping[str, Any]) -> None:
    """Replace the file atomically and durably: its bytes and its folder are on disk on return. Raises LedgerError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_private(path, _text(made))
        files.sync_folder(path.parent)
    except OSError as error:
        raise LedgerError(
            f"cannot write {path}", why=str(error), todo="free some space, or make its folder writable"
        ) from error


def sweep(path: Path) -> None:
    """Remove incomplete files of killed writers; only for the process that may replace the file now."""
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            left.unlink()


def read(path: Path) -> Snapshot | None:
    """Return the snapshot, or None if there is none. Raises BadConfig with the reason if it is invalid."""
    try:
        content = files.read_own(path, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse(content, str(path))


def parse(content: bytes | str, where: str) -> Snapshot:
    """Parse a snapshot. Raises BadConfig, naming `where`, unless it is a complete snapshot of a known version."""
    try:
        data = parse_json(content, what=where)
    except ValueError as error:
        raise BadConfig(f"{where} is not a snapshot of decisions", why=str(error)) from error
    return validate(data, where)


def validate(data: Any, where: str) -> Snapshot:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BadConfig(f"{where} is not a snapshot of decisions", why=f'its "format" is not "{FORMAT}"')
    if data.get("version") != VERSION:
        raise BadConfig(
            f"{where} is of version {data.get('version')!r:.40}",
            why=f"this autosel reads {VERSION}",
            todo="upgrade autosel",
        )
    body = {name: data.get(name) for name in ("format", "version", "epoch", "rows")}
    try:
        found = _digest(body)
    except (TypeError, ValueError) as error:  # integers past 2^53, lone surrogates
        raise BadConfig(f"{where} is not a snapshot of decisions", why=str(error)) from error
    if set(data) != {*body, "digest"} or data["digest"] != found:
        raise BadConfig(f"{where} was damaged or edited", why="its digest does not match its content")
    return Snapshot(epoch=_epoch(data["epoch"], where), rows=_rows(data["rows"], where), digest=found)


def _epoch(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadConfig(f"{where}: epoch is {value!r:.40}")
    return value


def _rows(rows: Any, where: str) -> tuple[Row, ...]:
    if not isinstance(rows, list):
        raise BadConfig(f"{where}: rows is not a list")
    made = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != {"key", "epoch", "decision"} or not isinstance(row["key"], str):
            raise BadConfig(f"{where}: row {number} is not {{key, epoch, decision}}")
        if not isinstance(row["decision"], dict):
            raise BadConfig(f"{where}: row {number} holds no decision")
        made.append(
            Row(key=modern_key(row["key"]), epoch=_epoch(row["epoch"], where), document=modern(row["decision"]))
        )
    if len({row.key for row in made}) != len(made):
        raise BadConfig(f"{where}: a key appears twice")
    return tuple(made)
