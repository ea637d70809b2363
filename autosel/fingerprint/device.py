"""Take the fingerprint of a device of this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from autosel.errors import BuildError, UnknownName
from autosel.fingerprint import gpu, machine, neighbours, noise, nvml, probe, stack, store
from autosel.values import CONTENDED_CORES, Fingerprint, Rate

DEVICES = ("cpu", "cuda")
LOOK_S = 0.2  # duration at which other work is ten times the resolution of the counters


def take(device: str = "cpu", *, refresh: bool = False) -> Fingerprint:
    """Return the fingerprint: identity and environment read now; rates measured once per env_id (about 2 s), then
    reused; `refresh` measures again. Rates of a CPU that were measured next to other work are measured again once the
    machine is quiet.

    `cuda`, `cuda:1`: the GPU of that number, as CUDA counts. Raises UnknownName for an unknown kind of device,
    UsageError for a GPU that is missing, or lacks the packages that measure it.
    """
    kind, _, number = device.partition(":")
    if kind not in DEVICES or not (number or "0").isdecimal() or (kind == "cpu" and int(number or 0) > 0):
        raise UnknownName("device", device, DEVICES)
    if kind == "cuda":
        return gpu.take(int(number or 0), refresh=refresh)
    known = _identified()
    stored = store.read(known.env_id)
    usable = stored is not None and not refresh and f"read_bytes_per_s@{known.cpus}" in stored.rates
    if stored is None or not usable or (stored.contended and _quiet()):
        return _measured(known, {} if stored is None or stored.contended else stored.rates)
    return dataclasses.replace(stored, threads=known.threads)


def at(fp: Fingerprint, threads: int) -> Fingerprint:
    """Return a CPU's fingerprint for at most so many threads; 0: as it is."""
    fewer = fp.kind == "cpu" and 0 < threads < fp.cpus
    return dataclasses.replace(fp, threads=threads) if fewer else fp


def present() -> tuple[str, ...]:
    """Return the CPU and every GPU that CUDA sees here, by `take`'s names."""
    return ("cpu", *(f"cuda:{number}" for number in range(nvml.count())))


def unit(device: str) -> str:
    """Distinguish equal devices of this machine: a GPU's UUID; empty for the single CPU."""
    kind, _, number = device.partition(":")
    return nvml.read(int(number or 0)).uuid if kind == "cuda" else ""


def _identified() -> Fingerprint:
    hardware, usable = machine.hardware(), machine.identity()["cpus"]
    return Fingerprint(
        kind="cpu",
        name=hardware["model"],
        identity=hardware,
        environment=stack.environment(),
        rates={},
        threads=usable if usable < hardware["cpus"] else 0,
    )


def _quiet() -> bool:
    """Return True if no other process uses a core now."""
    before = neighbours.read()
    time.sleep(LOOK_S)
    return neighbours.between(before, neighbours.read()).cores <= CONTENDED_CORES


def _measured(known: Fingerprint, before_it: Mapping[str, Rate]) -> Fingerprint:
    """Measure and store the rates; those of other numbers of threads stay."""
    before = neighbours.read()
    notes: tuple[str, ...] = ()
    try:
        rates = probe.measure()
    except (BuildError, MemoryError) as error:
        rates = probe.measure_without_compiler(machine.identity())
        notes = (f"rates by numpy: {str(error).splitlines()[0]}",)
    noisy = noise.reasons(neighbours.between(before, neighbours.read()), rates)
    fp = dataclasses.replace(known, rates={**before_it, **rates}, contended=bool(noisy), notes=(*notes, *noisy))
    trouble = store.write(fp)
    return dataclasses.replace(fp, notes=(*fp.notes, trouble)) if trouble else fp
