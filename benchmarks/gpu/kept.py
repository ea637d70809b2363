"""Store results of a run, one file a stage, rewritten after every unit: a kill loses only the current unit."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autosel.errors import AutoselError

BEGINNING = "the stage's beginning"  # pseudo unit of a stage whose process did not start the last time


@dataclass(slots=True, kw_only=True)
class StageResult:
    """Hold a stage's results. `key` is the digest of scope, device, software and sources."""

    stage: str
    key: str
    device: dict[str, Any]
    scope: dict[str, Any]
    git_sha: str
    started: str  # UTC, ISO 8601
    seconds: float = 0.0
    listed: list[str] = field(default_factory=list)  # all units of the stage
    units: dict[str, dict[str, Any]] = field(default_factory=dict)  # finished units, by name

    @property
    def undone(self) -> list[str]:
        return [name for name in self.listed if name not in self.units]

    @property
    def failed(self) -> list[str]:
        return [name for name, found in self.units.items() if not found["ok"]]


class RunFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder, which is created. Raises AutoselError if it cannot be created."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AutoselError(f"cannot make {self.folder}", why=str(error), todo="--out DIR") from error
        return self.folder / name

    def read(self, stage: str) -> StageResult | None:
        """Return the record of an earlier run; None if it cannot be read."""
        try:
            return StageResult(**json.loads((self.folder / f"{stage}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, record: StageResult) -> None:
        self.write_text(f"{record.stage}.json", json.dumps(asdict(record), indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write the file atomically."""
        path = self.path(name)
        descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{name}.")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(made).chmod(0o644)
        Path(made).replace(path)

    def records(self, stages: tuple[str, ...]) -> Iterator[StageResult]:
        for stage in stages:
            record = self.read(stage)
            if record is not None:
                yield record
