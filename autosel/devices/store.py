"""Store measured fingerprints on disk, one file per env_id: rates are measured once and reused until they drift."""

from __future__ import annotations

import json
import math
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from autosel import files, settings
from autosel.values import Fingerprint, from_json, parse_json, to_json

MOST_BYTES = 1 << 20


def path_of(env_id: str) -> Path:
    return settings.home() / "fingerprint" / f"{env_id}.json"


def read(env_id: str) -> Fingerprint | None:
    """Return the stored fingerprint of this env_id; None if there is none or its file was changed."""
    try:
        fp: Fingerprint = from_json(
            Fingerprint, parse_json(files.read(path_of(env_id), MOST_BYTES), what="fingerprint")
        )
        if fp.env_id != env_id:  # ValueError if its identity has no canonical form
            return None
    except (OSError, ValueError):
        return None
    return fp if all(math.isfinite(r.value) and r.value > 0 and r.spread >= 0 for r in fp.rates.values()) else None


@lru_cache(maxsize=64)
def of_hardware(hw_id: str) -> Fingerprint | None:
    """Return a stored fingerprint of this hardware, with any software; None if there is none."""
    for path in sorted(path_of("").parent.glob("*.json")):
        found = read(path.stem)
        if found is not None and found.hw_id == hw_id:
            return found
    return None


def write(fp: Fingerprint) -> str:
    """Store it completely or not at all; return the reason for a failure, else the empty string."""
    path = path_of(fp.env_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".making-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(to_json(fp), file, indent=1, allow_nan=False)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        return f"rates are not kept: {path.parent}: {error.strerror or error}"
    return ""
