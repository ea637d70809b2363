"""An engine's files and their manifest in a folder.

`autosel.json` is the manifest: what each row says, from which decision or formula, and a digest of each file. It is
written last, each file whole or not at all. What an earlier export wrote and this one does not is removed, if it is
still as it was written; nothing else in the folder is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel.errors import BadConfig
from autosel.integrations.engines.rows import WORDS, Row, Source, counted
from autosel.values import Fingerprint, from_json, parse_json, to_json
from autosel.version import __version__

MANIFEST = "autosel.json"
SCHEMA = 1
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`engine_version`: the release whose formats and defaults these are. `triton` and `device` are part of some
    engines' file names."""

    engine: str
    engine_version: str
    device: str
    model: str
    dtype: str
    rows: tuple[Row, ...]
    digests: Mapping[str, str]
    schema: int = SCHEMA
    autosel: str = __version__

    @property
    def counts(self) -> Mapping[Source, int]:
        return counted(self.rows)


def write(
    folder: Path,
    *,
    engine: str,
    engine_version: str,
    fp: Fingerprint | None,
    model: str,
    dtype: str,
    rows: Sequence[Row],
    files: Mapping[str, str],
) -> Manifest:
    """Put the files and their manifest there. Raises BadConfig; then no file is half written."""
    before = _earlier(folder, engine)
    made = Manifest(
        engine=engine,
        engine_version=engine_version,
        device=fp.name if fp else "",
        model=model,
        dtype=dtype,
        rows=tuple(rows),
        digests={name: _digest(text.encode()) for name, text in files.items()},
    )
    for name, text in files.items():
        _replace(folder / name, text)
    for name, digest in before.items():
        if name not in files and _digest_of(folder / name) == digest:
            with suppress(OSError):
                (folder / name).unlink()
    _replace(folder / MANIFEST, json.dumps({"sources": WORDS, **to_json(made)}, indent=1) + "\n")
    return made


def read(folder: Path) -> Manifest:
    """The manifest of an export. Raises BadConfig, naming what is wrong."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadConfig(
            f"{folder} holds no export of autosel",
            why=f"{path.name}: {error.strerror or error}",
            todo="name its folder",
        ) from error
    try:
        data = parse_json(content, what=str(path))
        if len(content) > MOST_BYTES or not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema') if isinstance(data, dict) else '?'!r}, known: {SCHEMA}")
        data.pop("sources", None)  # for who reads the file
        made: Manifest = from_json(Manifest, data)
    except ValueError as error:
        raise BadConfig(f"{path} is no manifest of an export", why=str(error), todo="export again") from error
    for name in made.digests:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadConfig(f"{path}: {name!r:.80} leads elsewhere")
    return made


def changed(folder: Path, made: Manifest) -> tuple[str, ...]:
    """Files that are no longer as they were written, or gone."""
    return tuple(name for name, digest in made.digests.items() if _digest_of(folder / name) != digest)


def _earlier(folder: Path, engine: str) -> Mapping[str, str]:
    """What the export that lies there wrote. One for another engine is not ours to replace."""
    if not (folder / MANIFEST).exists():
        return {}
    found = read(folder)
    if found.engine != engine:
        raise BadConfig(
            f"{folder} holds an export to {found.engine}", why=f"this one is to {engine}", todo="name another folder"
        )
    return found.digests


def _replace(path: Path, text: str) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        making.write_text(text, encoding="utf-8")
        making.replace(path)
    except OSError as error:
        with suppress(OSError):
            making.unlink()
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return ""


def document(value: Any) -> str:
    """JSON as an engine's file has it."""
    return json.dumps(value, indent=4) + "\n"
