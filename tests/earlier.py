"""A home that an earlier version wrote (tests/stored/462cf5c), and copies of it that a test may open.

The original is never changed. In a test that uses `there`, this machine has the identity of the device that wrote it,
from its stored fingerprint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autosel.values import Fingerprint, from_json

FOLDER = Path(__file__).parent / "stored" / "462cf5c"
KEPT = ("ledger.db", "decisions.json")  # files of the home; the other entries are outputs of its commands
CERTIFICATES = FOLDER / "certificates.jsonl"
BUNDLE, LOCK = FOLDER / "bundle.json", FOLDER / "autosel.lock"
TINY = FOLDER / "tiny"


def copied(home: Path) -> Path:
    """Make a home with the stored ledger and snapshot, and nothing else."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(FOLDER / "home" / name, home / name)
        (home / name).chmod(0o600)
    return home


def said(name: str) -> Any:
    """Return the --json output of a command of that version."""
    return json.loads((FOLDER / "json" / f"{name}.json").read_text())


def device() -> Fingerprint:
    """Return the fingerprint of the device that wrote the home."""
    stated = said("fingerprint")
    made: Fingerprint = from_json(Fingerprint, {n: stated[n] for n in Fingerprint.__dataclass_fields__ if n in stated})
    return made


@contextmanager
def there(threads: int = 2) -> Iterator[None]:
    """Let this machine have the identity of that device, and as many threads as it ran."""
    import torch

    from autosel.devices import this_device
    from autosel.devices.cpu import machine
    from autosel.devices.cpu.identity import former_id

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("identity", "hardware"):
            patch.setattr(machine, name, lambda: dict(device().identity))
        former_id.cache_clear()
        this_device.cache_clear()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            this_device.cache_clear()
            former_id.cache_clear()
