"""Keep a journal of faults in service: one small file each in `<home>/faults`. Imports neither SQLAlchemy nor torch.

A serving process never opens the database: it writes its faults here. The next process that opens the ledger for
writing stores the file (`Ledger`), and then removes it. Until then every process that serves from this home, also one
that starts later, disables the arm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autosel import files
from autosel.errors import BadConfig
from autosel.ledger.durable import replace_private
from autosel.ledger.former import modern
from autosel.values import Arm, Decision, digest, from_json, parse_json, to_json

FOLDER = "faults"
MOST_BYTES = 1 << 20
# bytes read; a fault's file is named after its arm and decision, so a repeated fault replaces the first
MOST_FILES = 1000

# kernel: wrong again on the same inputs. race: not wrong again. device: the baseline disagrees with itself. raised: it
# raised an exception. slow: it is slower than the baseline. unchecked: the check itself failed (never in the journal).
Cause = Literal["kernel", "race", "device", "raised", "slow", "unchecked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Describe a fault of a served arm, with the evidence."""

    cause: Cause
    reason: str
    decision: Decision
    workload: str  # key of this call
    evidence: Mapping[str, Any]
    seen_at: str  # UTC, ISO 8601

    @property
    def arm(self) -> Arm:
        return self.decision.arm

    @property
    def id(self) -> str:
        d = self.decision
        return digest([self.cause, d.id, d.op, d.hw_id, d.mode, d.bucket, d.arm.candidate, d.arm.digest])[:32]


def folder(home: Path) -> Path:
    return home / FOLDER


def write(home: Path, fault: Fault) -> Path:
    """Write it to disk, completely or not at all. Raises OSError."""
    path = folder(home) / f"{fault.id}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_private(path, json.dumps(plain(to_json(fault)), separators=(",", ":"), allow_nan=False))
    return path


def plain(value: Any) -> Any:
    """Replace NaN, which JSON lacks, by its name."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def pending(home: Path) -> list[tuple[Path, Fault | BadConfig]]:
    """Return the journal, oldest name first; for an invalid file, the reason instead of the fault."""
    try:
        paths = sorted(p for p in folder(home).iterdir() if p.suffix == ".json")[:MOST_FILES]
    except OSError:
        return []
    found: list[tuple[Path, Fault | BadConfig]] = []
    for path in paths:
        try:
            found.append((path, read(path)))
        except FileNotFoundError:  # stored in the meantime
            continue
        except BadConfig as error:
            found.append((path, error))
    return found


def read(path: Path) -> Fault:
    """Read a fault. Raises BadConfig for a file that is not a fault, or that others could have written;
    FileNotFoundError."""
    content = files.read_own(path, MOST_BYTES, follow=False)
    try:
        made: Fault = from_json(Fault, modern(parse_json(content, what=str(path))))
    except ValueError as error:
        raise BadConfig(f"{path} is not a fault", why=str(error)) from error
    return made


def stamp(home: Path) -> int:
    """Return a value that changes when a fault is added or removed."""
    try:
        return folder(home).stat().st_mtime_ns
    except OSError:
        return 0
