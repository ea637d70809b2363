"""Take the fingerprint of a device of this machine."""

from __future__ import annotations

import dataclasses

from autosel.errors import BuildError, UnknownName
from autosel.fingerprint import gpu, machine, noise, nvml, probe, stack, store
from autosel.values import Fingerprint

DEVICES = ("cpu", "cuda")


def take(device: str = "cpu", *, refresh: bool = False) -> Fingerprint:
    """Identity and environment read now; rates measured once per env_id (about 2 s), then reused; `refresh` measures.

    `cuda`, `cuda:1`: the GPU of that number, as CUDA counts. Raises UnknownName for a kind of device nobody knows,
    UsageError for a GPU that is not here, or lacks what measures it.
    """
    kind, _, number = device.partition(":")
    if kind not in DEVICES or not (number or "0").isdecimal() or (kind == "cpu" and int(number or 0) > 0):
        raise UnknownName("device", device, DEVICES)
    if kind == "cuda":
        return gpu.take(int(number or 0), refresh=refresh)
    known = _identified()
    stored = None if refresh else store.read(known.env_id)
    return stored or _measured(known)


def present() -> tuple[str, ...]:
    """The CPU, and every GPU that CUDA sees here, as `take` calls them."""
    return ("cpu", *(f"cuda:{number}" for number in range(nvml.count())))


def unit(device: str) -> str:
    """Which of several equal devices of this machine: a GPU's UUID; empty for the CPU, of which there is one."""
    kind, _, number = device.partition(":")
    return nvml.read(int(number or 0)).uuid if kind == "cuda" else ""


def _identified() -> Fingerprint:
    identity = machine.identity()
    return Fingerprint(kind="cpu", name=identity["model"], identity=identity, environment=stack.environment(), rates={})


def _measured(known: Fingerprint) -> Fingerprint:
    load, before = noise.load_average(), noise.ticks()
    notes: tuple[str, ...] = ()
    try:
        rates = probe.measure()
    except (BuildError, MemoryError) as error:
        rates = probe.measure_without_compiler(known.identity)
        notes = (f"rates by numpy: {str(error).splitlines()[0]}",)
    cores = int(known.identity["cores"])
    noisy = noise.reasons(load=load, cores=cores, before=before, after=noise.ticks(), rates=rates)
    fp = dataclasses.replace(known, rates=rates, contended=bool(noisy), notes=(*notes, *noisy))
    trouble = store.write(fp)
    return dataclasses.replace(fp, notes=(*fp.notes, trouble)) if trouble else fp
