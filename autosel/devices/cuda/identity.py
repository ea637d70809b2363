"""Take a GPU's fingerprint: identity from the runtime and NVML, rates from the probes, stored like a CPU's.

Status: compiled and tested on recorded readings; not yet run on silicon.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autosel import settings
from autosel.devices import stack, store
from autosel.devices.cuda import nvml
from autosel.values import Fingerprint

if TYPE_CHECKING:
    from autosel.devices.cuda import probe

GPU_PACKS = ("cuda", "cutlass", "triton")  # folders in kernels/ whose sources run on a GPU
OF_THE_HOST = ("host_launch_s",)  # timed by the host's clock: disturbances of it are not work on the device
# Maximum wait before the second attempt. Idle clocks are low within a second; a die cools in some seconds, a heat sink
# in minutes, which is too long to wait: not measured on a GPU.
COOLING_LEAST_S, COOLING_MOST_S, COOLING_STEP_S = 2.0, 10.0, 0.5
SLOWED = (
    "the device was slowed in both of two measurements: {}; its rates are not stored and its knobs follow from slowed "
    "rates: look to its cooling and power supply (nvidia-smi -q -d PERFORMANCE), then measure again"
)
# relative change of a power limit or a share of SMs above which rates no longer hold; the device is the same
VOID = 0.05
NOISY_SPREAD = 0.10  # between the best and the worst of five windows of 20 ms: another process uses the device


def identified(ordinal: int = 0) -> Fingerprint:
    """Return the identity of CUDA's device `ordinal`, without measuring and without versions. Raises UsageError as
    `take` does."""
    readings = nvml.read(ordinal)
    return Fingerprint(kind="cuda", name=readings.name, identity=nvml.identity_of(readings), environment={}, rates={})


def take(ordinal: int = 0, *, refresh: bool = False) -> Fingerprint:
    """Return the fingerprint of CUDA's device `ordinal`; rates measured once per env_id (about 3 s), then reused until
    its power limit or its share of SMs changes by more than 5 %.

    If heat or a power brake slowed the device, rates are measured again after 2 to 10 s; if it is still slowed, they
    are marked (`contended`, a note with the reasons) and not stored. Raises UsageError: no driver, no cupy, no such
    device, or a MIG slice that cannot be told from its neighbours.
    """
    readings = nvml.read(ordinal)
    known = Fingerprint(
        kind="cuda",
        name=readings.name,
        identity=nvml.identity_of(readings),
        environment=environment(readings.driver),
        rates={},
        validity=validity(readings),
    )
    stored = None if refresh else store.read(known.env_id)
    if stored is None:
        return _measured(known, ordinal, readings)
    why = changed(stored.validity, known.validity)
    if not why:
        return stored
    fresh = _measured(known, ordinal, readings)
    return dataclasses.replace(fresh, notes=(*fresh.notes, f"measured again: {why}"))


def validity(readings: nvml.Readings) -> dict[str, float]:
    """Return the conditions of measured rates, in addition to the identity; unknown to NVML means left out."""
    limit = {} if readings.power_limit_w is None else {"power_limit_w": readings.power_limit_w}
    return {**limit, "mps_share": settings.mps_share()}


def changed(stored: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Return which condition has changed, or "". Conditions known on one side only are ignored."""
    moved = [n for n in now if n in stored and abs(now[n] - stored[n]) > VOID * stored[n]]
    return ", ".join(f"{name} was {stored[name]:g} and is {now[name]:g}" for name in moved)


def environment(driver: str) -> dict[str, Any]:
    """Return the versions that determine how fast a kernel runs, without the CPU part of the kernel pack."""
    host = stack.environment()
    return {
        **{key: host[key] for key in ("autosel", "torch", "tvm_ffi", "compiler", "python", "libc")},
        "kernel_pack": {kind: stack.pack_digest(kind) for kind in GPU_PACKS},
        "triton": stack.version_of("triton"),
        "driver": driver,
    }


def _measured(known: Fingerprint, ordinal: int, readings: nvml.Readings) -> Fingerprint:
    found = _unslowed(ordinal, readings)
    spread = max((rate.spread for name, rate in found.rates.items() if name not in OF_THE_HOST), default=0.0)
    noisy = [f"a rate spread by {spread:.0%} over its windows"] if spread > NOISY_SPREAD else []
    noisy += [SLOWED.format(found.slowed)] if found.slowed else []
    fp = dataclasses.replace(known, rates=found.rates, contended=bool(noisy), notes=(*found.notes, *noisy))
    # A slowed device's rates hold for this call only: stored, they would count as the device's capability.
    trouble = "" if found.slowed else store.write(fp)
    return dataclasses.replace(fp, notes=(*fp.notes, trouble)) if trouble else fp


def _unslowed(ordinal: int, readings: nvml.Readings) -> probe.ProbedRates:
    """Measure; repeat once after a pause if heat or a power brake slowed the device."""
    from autosel.devices.cuda import probe

    found = probe.measure(ordinal, readings)
    if not found.slowed:
        return found
    _cool(readings.uuid)
    return probe.measure(ordinal, readings)


def _cool(uuid: str) -> None:
    """Leave the device idle for a while: longer, up to a limit, if it is slowed even when idle."""
    began = time.monotonic()
    time.sleep(COOLING_LEAST_S)
    while nvml.slowdown(uuid) and time.monotonic() - began < COOLING_MOST_S:
        time.sleep(COOLING_STEP_S)
