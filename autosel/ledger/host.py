"""Identify this host: a shared ledger stores with each proof and decision where it was made."""

from __future__ import annotations

import os
import platform
import secrets
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from autosel import files

FILE = "host"
MOST_BYTES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Identify a host. `id` is of this home on this machine: a home that is copied to another machine is another host
    there. `name` is for people."""

    id: str
    name: str


def here(home: Path) -> Host:
    """Return this host; the first call stores it in the home, if that can be written."""
    secret = _secret(home / FILE)
    return Host(id=sha256(f"{secret} {_machine()}".encode()).hexdigest()[:32], name=platform.node()[:200])


def _secret(path: Path) -> str:
    """Return the home's random secret. If it cannot be stored, the machine alone identifies the host."""
    making = path.parent / "locks" / f"host.{secrets.token_hex(8)}"
    try:
        if not path.exists():
            making.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            making.write_text(secrets.token_hex(16))
            with suppress(FileExistsError):
                os.link(making, path)  # completely or not at all, and the first one stays
        return files.read(path, MOST_BYTES).decode(errors="replace")[:64]
    except OSError:
        return ""
    finally:
        with suppress(OSError):
            making.unlink()


def _machine() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
