"""A GPU's fingerprint: identity from the runtime and NVML, rates from the probes, stored like a CPU's.

Status: compiled and tested on recorded readings; not yet run on silicon.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

from autosel.fingerprint import nvml, stack, store
from autosel.values import Fingerprint

GPU_PACKS = ("cuda", "cutlass", "triton")  # folders of kernels/ whose sources run on a GPU
OF_THE_HOST = ("host_launch_s",)  # timed by the host's clock: what disturbs it is no work on the device
NOISY_SPREAD = 0.10  # between the best and the worst of five windows of 20 ms: somebody else is on the device


def identified(ordinal: int = 0) -> Fingerprint:
    """Who CUDA's device `ordinal` is: nothing measured, versions left out. Raises UsageError as `take` does."""
    readings = nvml.read(ordinal)
    return Fingerprint(kind="cuda", name=readings.name, identity=nvml.identity_of(readings), environment={}, rates={})


def take(ordinal: int = 0, *, refresh: bool = False) -> Fingerprint:
    """The fingerprint of CUDA's device `ordinal`; rates measured once per env_id (about 3 s), then reused.

    Raises UsageError: no driver, no cupy, no such device, or a MIG slice that cannot be told from its neighbours.
    """
    readings = nvml.read(ordinal)
    known = Fingerprint(
        kind="cuda",
        name=readings.name,
        identity=nvml.identity_of(readings),
        environment=environment(readings.driver),
        rates={},
    )
    stored = None if refresh else store.read(known.env_id)
    return stored or _measured(known, ordinal, readings)


def environment(driver: str) -> dict[str, Any]:
    """Versions that decide how fast a kernel runs; the CPU part of the kernel pack is not among them."""
    host = stack.environment()
    return {
        **{key: host[key] for key in ("autosel", "torch", "tvm_ffi", "compiler", "python", "libc")},
        "kernel_pack": {kind: stack.pack_digest(kind) for kind in GPU_PACKS},
        "triton": _version("triton"),
        "driver": driver,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _measured(known: Fingerprint, ordinal: int, readings: nvml.Readings) -> Fingerprint:
    from autosel.fingerprint import gpu_probe

    found = gpu_probe.measure(ordinal, readings)
    spread = max((rate.spread for name, rate in found.rates.items() if name not in OF_THE_HOST), default=0.0)
    noisy = [f"a rate spread by {spread:.0%} over its windows"] if spread > NOISY_SPREAD else []
    noisy += [f"the device was slowed: {found.slowed}"] if found.slowed else []
    fp = dataclasses.replace(known, rates=found.rates, contended=bool(noisy), notes=(*found.notes, *noisy))
    trouble = store.write(fp)
    return dataclasses.replace(fp, notes=(*fp.notes, trouble)) if trouble else fp
