"""Provide the shared home and environment of tests, and homes of single tests that start with its contents.

Compiled kernels are stored under digests of all their inputs, rates under the device's id, and probes of libraries
under their versions, so an entry of another test equals the one that a test would make itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path

# Tests run in one process per core, each with PyTorch's threads on all cores. At a barrier they must not spin for a
# thread that has no core: that took ten times the CPU time of a small model's step.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Each process of autosel would compile its modules again, for 0.4 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SHARED = Path(os.environ.setdefault("AUTOSEL_HOME", str(Path(__file__).resolve().parents[1] / ".autosel" / "tests")))


def furnish(home: Path) -> Path:
    """Make a home without a ledger, with this device's rates and the shared builds."""
    home.mkdir(mode=0o700, parents=True)
    for name in ("native", "cache"):
        (home / name).symlink_to(shared(name))
    lend_rates(home)
    return home


def lend_rates(home: Path) -> None:
    """Give a home this device's rates, unless it has them: measuring takes two seconds."""
    if not (home / "fingerprint").exists():
        measure()
        shutil.copytree(SHARED / "fingerprint", home / "fingerprint")


def shared(*names: str) -> Path:
    """Return a folder of the shared home."""
    folder = SHARED.joinpath(*names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def measure() -> None:
    """Measure this device in the shared home, once.

    Rates measured beside other tests are replaced once the machine is quiet, and arms change with the rates. Those of
    the shared home are final, because a test that asks twice must get the same arms.
    """
    import pytest

    from autosel import fingerprint, settings
    from autosel.devices import store

    with pytest.MonkeyPatch.context() as patch, open(shared() / "measuring.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("AUTOSEL_HOME", str(SHARED))
        settings.read.cache_clear()
        taken = fingerprint.take("cpu")
        if taken.contended:
            assert not store.write(replace(taken, contended=False))
    settings.read.cache_clear()
