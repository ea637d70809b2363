"""Take the CPU's fingerprint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import cache

from autosel.devices import stack, store
from autosel.devices.cpu import machine, neighbours, noise, probe
from autosel.errors import BuildError
from autosel.values import CONTENDED_CORES, Fingerprint, Rate, digest

LOOK_S = 0.2  # duration at which other work is ten times the resolution of the counters


def take(*, refresh: bool = False) -> Fingerprint:
    """Return the fingerprint. Rates that were measured next to other work are measured again once the machine is
    quiet.
    """
    known = dataclasses.replace(identified(), environment=stack.environment())
    stored = store.read(known.env_id)
    usable = stored is not None and not refresh and f"read_bytes_per_s@{known.cpus}" in stored.rates
    if stored is None or not usable or (stored.contended and _quiet()):
        return _measured(known, {} if stored is None or stored.contended else stored.rates)
    return dataclasses.replace(stored, threads=known.threads)


def identified() -> Fingerprint:
    """Return the identity alone, in a few milliseconds, without measuring."""
    hardware, usable = machine.hardware(), machine.identity()["cpus"]
    fewer = usable if usable < hardware["cpus"] else 0
    return Fingerprint(kind="cpu", name=hardware["model"], identity=hardware, environment={}, rates={}, threads=fewer)


@cache
def former_id() -> str:
    """Return the id that earlier versions gave a process bound to some of its cores."""
    return digest({"kind": "cpu", **machine.identity()})


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
