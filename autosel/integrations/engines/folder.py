"""Keep an engine's files and their manifest in a folder.

`autosel.json` is the manifest: the content of each row, its decision or formula, and a digest of each file. All files
are first written elsewhere and then moved into place, the manifest last. If one cannot be written or moved, the folder
is restored. Files of an earlier export that are not in this one are removed if unchanged; nothing else in the folder is
touched.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import files
from autosel.errors import BadConfig
from autosel.integrations.engines.rows import WORDS, EngineRow, Source, counted
from autosel.values import Fingerprint, from_json, parse_json, to_json
from autosel.version import __version__

MANIFEST = "autosel.json"
SCHEMA = 1
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describe the files. `engine_version`: the release of these formats and defaults. `triton` and `device` are part
    of some engines' file names."""

    engine: str
    engine_version: str
    device: str
    model: str
    dtype: str
    rows: tuple[EngineRow, ...]
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
    model: str = "",
    dtype: str = "",
    rows: Sequence[EngineRow],
    files: Mapping[str, str],
) -> Manifest:
    """Write the files and their manifest. Raises BadConfig, leaving the folder unchanged."""
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
    put(folder, {**files, MANIFEST: json.dumps({"sources": WORDS, **to_json(made)}, indent=1) + "\n"})
    for name, digest in before.items():
        if name not in files and _digest_of(folder / name) == digest:
            with suppress(OSError):
                (folder / name).unlink()
    return made


def read(folder: Path) -> Manifest:
    """Return the manifest of an export. Raises BadConfig, naming the error."""
    path = folder / MANIFEST
    try:
        content = files.read(path, MOST_BYTES)
    except OSError as error:
        raise BadConfig(
            f"{folder} holds no export of autosel",
            why=f"{path.name}: {error.strerror or error}",
            todo="name its folder",
        ) from error
    try:
        data = parse_json(content, what=str(path))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema') if isinstance(data, dict) else '?'!r}, known: {SCHEMA}")
        data.pop("sources", None)  # for human readers
        made: Manifest = from_json(Manifest, data)
    except ValueError as error:
        raise BadConfig(f"{path} is not the manifest of an export", why=str(error), todo="export again") from error
    for name in made.digests:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadConfig(f"{path}: {name!r:.80} leads elsewhere")
    return made


def changed(folder: Path, made: Manifest) -> tuple[str, ...]:
    """Return files that were changed or removed since they were written."""
    return tuple(name for name, digest in made.digests.items() if _digest_of(folder / name) != digest)


def _earlier(folder: Path, engine: str) -> Mapping[str, str]:
    """Return the manifest of the earlier export in the folder. An export for another engine is not replaced."""
    if not (folder / MANIFEST).exists():
        return {}
    found = read(folder)
    if found.engine != engine:
        raise BadConfig(
            f"{folder} holds an export to {found.engine}", why=f"this one is to {engine}", todo="name another folder"
        )
    return found.digests


# --- all files, or none -----------------------------------------------------------------------------------------------


def put(folder: Path, files: Mapping[str, str]) -> None:
    """Move all files into place in this order, or none: raises BadConfig, with the folder unchanged. If the machine
    dies during the moves, some files are new, and the replaced ones are in `.autosel-*`."""
    with _aside(folder) as aside:
        for name, text in files.items():
            path = aside / "new" / name
            with _naming(folder / name):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        moved: list[str] = []
        try:
            for name in files:
                with _naming(folder / name):
                    _move(folder / name, aside / "old" / name, aside / "new" / name)
                moved.append(name)
        except BaseException:
            for name in reversed(moved):
                _move_back(folder, name, aside / "old" / name)
            raise


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same disk."""
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".autosel-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error


def _move(path: Path, old: Path, new: Path) -> None:
    """Move `new` to `path`, and the present file to `old`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(0, "a folder of this name is there")
    if path.exists():
        old.parent.mkdir(parents=True, exist_ok=True)
        path.replace(old)
    try:
        new.replace(path)
    except OSError:
        if old.exists():
            old.replace(path)
        raise


def _move_back(folder: Path, name: str, old: Path) -> None:
    """Restore the previous files, and remove folders that are empty now."""
    path = folder / name
    with suppress(OSError):
        if old.exists():
            old.replace(path)
            return
        path.unlink()
        for parent in path.parents:
            if parent == folder:
                return
            parent.rmdir()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(path: Path) -> str:
    try:
        return _digest(files.read(path, MOST_BYTES))
    except OSError:
        return ""


def document(value: Any) -> str:
    """Return JSON as an engine's file has it."""
    return json.dumps(value, indent=4) + "\n"
