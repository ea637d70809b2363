"""The journal of faults seen in service: one small file each below `<home>/faults`. No SQLAlchemy, no torch here.

A serving process never opens the database: it writes here what it has seen; the next process that opens the ledger for
writing takes the file in (`Ledger`), and then removes it. Until then every process that serves from this home holds the
arm back, also one that starts later.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autosel import files
from autosel.errors import BadConfig
from autosel.ledger.former import modern
from autosel.values import Arm, Decision, digest, from_json, parse_json, to_json

FOLDER = "faults"
MOST_BYTES = 1 << 20
MOST_FILES = 1000  # read; a fault's file has the name of its arm and decision, so that repeating it makes no second one

# kernel: wrong again on the same inputs. race: not wrong again. device: the baseline disagrees with itself.
# raised: it threw. slow: it loses to the baseline. unchecked: the check itself failed (never in the journal).
Cause = Literal["kernel", "race", "device", "raised", "slow", "unchecked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a served arm did, with the evidence."""

    cause: Cause
    reason: str
    decision: Decision
    workload: str  # key of the very call
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
    """Put it on disk, whole or not at all. Raises OSError."""
    place = folder(home)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = place / f"{fault.id}.json"
    making = place / f".{fault.id}.{os.getpid()}"
    with suppress(FileNotFoundError):
        making.unlink()  # left by a killed process that had our pid
    descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(plain(to_json(fault)), file, separators=(",", ":"), allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        making.replace(path)
    except BaseException:
        with suppress(OSError):
            making.unlink()
        raise
    return path


def plain(value: Any) -> Any:
    """JSON has no NaN: one that a check saw becomes its name."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def pending(home: Path) -> list[tuple[Path, Fault | BadConfig]]:
    """The journal, oldest name first; for a file that is not to be believed, the reason in place of the fault."""
    try:
        paths = sorted(p for p in folder(home).iterdir() if p.suffix == ".json")[:MOST_FILES]
    except OSError:
        return []
    found: list[tuple[Path, Fault | BadConfig]] = []
    for path in paths:
        try:
            found.append((path, read(path)))
        except FileNotFoundError:  # taken in meanwhile
            continue
        except BadConfig as error:
            found.append((path, error))
    return found


def read(path: Path) -> Fault:
    """Raises BadConfig for a file that is no fault, or that others could have written; FileNotFoundError."""
    content = files.read_own(path, MOST_BYTES, follow=False)
    try:
        made: Fault = from_json(Fault, modern(parse_json(content, what=str(path))))
    except ValueError as error:
        raise BadConfig(f"{path} is not a fault", why=str(error)) from error
    return made


def stamp(home: Path) -> int:
    """Changes when a fault comes or goes."""
    try:
        return folder(home).stat().st_mtime_ns
    except OSError:
        return 0
