"""Identify a device and measure its rates. `take()` is the entry point; identity and rates are kept separate."""

from __future__ import annotations

from autosel.fingerprint.device import at, present, take, unit
from autosel.fingerprint.drift import Drift, drifted
from autosel.fingerprint.known import load, names

__all__ = ["Drift", "at", "drifted", "load", "names", "present", "take", "unit"]
