"""Who this device is and how fast it was found to be. `take()` is the door; identity and rates are kept apart."""

from __future__ import annotations

from autosel.fingerprint.device import present, take, unit
from autosel.fingerprint.drift import Drift, drifted
from autosel.fingerprint.known import load, names

__all__ = ["Drift", "drifted", "load", "names", "present", "take", "unit"]
