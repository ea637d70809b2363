"""Identify a device and measure its rates. `take()` is the entry point; identity and rates are kept separate."""

from __future__ import annotations

import dataclasses

from autosel import devices
from autosel.devices.device import Drift
from autosel.fingerprint.known import load, names
from autosel.values import Fingerprint

__all__ = ["Drift", "at", "drifted", "load", "names", "present", "take", "unit"]


def take(device: str = devices.HOST, *, refresh: bool = False) -> Fingerprint:
    """Return the fingerprint: identity and environment read now; rates measured once per env_id (2 to 3 s), then
    reused; `refresh` measures again.

    `cuda`, `cuda:1`: the GPU of that number, as CUDA counts. Raises UnknownName for an unknown kind of device,
    UsageError for a GPU that is missing, or lacks the packages that measure it.
    """
    return devices.named(device).take(refresh=refresh)


def at(fp: Fingerprint, threads: int) -> Fingerprint:
    """Return a CPU's fingerprint for at most so many threads; 0: as it is."""
    fewer = devices.on_host(fp.kind) and 0 < threads < fp.cpus
    return dataclasses.replace(fp, threads=threads) if fewer else fp


def present() -> tuple[str, ...]:
    """Return the CPU and every other device that can be identified here, by `take`'s names."""
    return tuple(name for device in devices.KINDS.values() for name in device.counted())


def unit(device: str) -> str:
    """Distinguish equal devices of this machine: a GPU's UUID; empty for the single CPU."""
    return devices.named(device).unit()


def drifted(fp: Fingerprint, device: str = devices.HOST, *, seconds: float = 0.1) -> Drift:
    """Check the rates of the device with fingerprint `fp`, which `take` calls `device`.

    Raises BuildError without a compiler for a CPU's probes; UsageError as `take` does.
    """
    return devices.named(device).drifted(fp, seconds=seconds)
