"""Take the CPU's fingerprint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import cache

from autosel.devices import stack, store
from autosel.devices.cpu import machine, neighbours, probe
from autosel.devices.cpu.neighbours import Neighbours
from autosel.errors import BuildError
from autosel.values import CONTENDED_CORES, CONTENDED_STEAL, Fingerprint, Rate, digest

LOOK_S = 0.2  # duration at which other work is ten times the resolution of the counters
# (p90 - p10) / median of the read windows. Alone on two cloud machines with 2 cores it was 0.09 to 0.31; with one other
# busy process 0.44 to 1.3. Neighbours on the other side of a hypervisor show here alone.
SPREAD_LIMIT = 0.4


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
    noisy = noise(neighbours.between(before, neighbours.read()), rates)
    fp = dataclasses.replace(known, rates={**before_it, **rates}, contended=bool(noisy), notes=(*notes, *noisy))
    trouble = store.write(fp)
    return dataclasses.replace(fp, notes=(*fp.notes, trouble)) if trouble else fp


def noise(found: Neighbours, rates: Mapping[str, Rate]) -> tuple[str, ...]:
    """Return why a measurement is contended. `found`: what others took meanwhile.

    The load average does not show it: on an idle machine it is above one core for a minute after a command has ended.
    """
    told = []
    if found.cores > CONTENDED_CORES:
        by = f": {', '.join(found.by)}" if found.by else ""
        told.append(f"other processes kept {found.cores:.1f} cores busy (limit: {CONTENDED_CORES:g}){by}")
    if found.stolen > CONTENDED_STEAL:
        told.append(
            f"{100 * found.stolen:.1f} % of CPU time went to other guests (limit: {100 * CONTENDED_STEAL:.0f} %)"
        )
    spreads = {name: r.spread for name, r in rates.items() if name.startswith("read_bytes_per_s@")}
    if spreads and max(spreads.values()) > SPREAD_LIMIT:
        worst = max(spreads, key=lambda name: spreads[name])
        told.append(f"windows of {worst} spread by {100 * spreads[worst]:.0f} % (limit: {100 * SPREAD_LIMIT:.0f} %)")
    return tuple(told)
