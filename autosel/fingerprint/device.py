"""Take this machine's fingerprint, and tell whether its rates still hold."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from autosel.errors import BuildError, UnknownName
from autosel.fingerprint import gpu, machine, noise, nvml, probe, stack, store
from autosel.values import Fingerprint, Rate

DEVICES = ("cpu", "cuda")
DRIFT_LIMIT = 0.07  # of a rate, three looks in a row
LOOKS = 3


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


# --- drift -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Today's probe against the stored rate: ratios above 1 are better than stored."""

    read: float
    fork_join: float
    moved: bool  # one of them off by more than the limit in every look
    shared: bool  # the machine belongs to others too: then a drift says who was running, not what the device is
    seconds: float

    @property
    def reason(self) -> str:
        return f"read rate {self.read:.2f}x and fork-join speed {self.fork_join:.2f}x of what is stored"


def drifted(fp: Fingerprint, *, seconds: float = 0.1) -> Drift:
    """A probe of `seconds`: read rate and fork-join, in three looks; a rate has moved if it is off in all three."""
    started = time.monotonic()
    cpus = int(fp.identity["cpus"])
    read, join = fp.rates.get(f"read_bytes_per_s@{cpus}"), fp.rates.get(f"fork_join_s@{cpus}")
    reads, joins = [], []
    for _ in range(LOOKS):
        reads.append(_look_read(read, cpus, 0.7 * seconds / LOOKS))
        joins.append(_look_join(join, cpus, 0.3 * seconds / LOOKS))
    # The fork-join's windows are short and its floor is sharp, but a helper that fell asleep costs 50 us: only times
    # twice as long in every look count.
    moved = all(abs(r - 1) > DRIFT_LIMIT for r in reads) or all(j < 0.5 for j in joins)
    return Drift(
        read=max(reads),
        fork_join=max(joins),
        moved=moved,
        shared=is_shared(fp),
        seconds=time.monotonic() - started,
    )


def _look_read(stored: Rate | None, cpus: int, seconds: float) -> float:
    return _quantile(probe.load().read(cpus, seconds), "B/s") / stored.value if stored and _native(stored) else 1.0


def _look_join(stored: Rate | None, cpus: int, seconds: float) -> float:
    if stored is None:
        return 1.0
    return stored.value / _quantile(probe.load().windows("fork_join", cpus, seconds=seconds), "s")


def _native(rate: Rate) -> bool:
    return probe.SOURCE in rate.source


def _quantile(figures: list[float], unit: str) -> float:
    return probe.summary(figures, unit, "").value


def is_shared(fp: Fingerprint) -> bool:
    """A virtual machine, a quota, or an affinity that leaves cores to others."""
    identity = fp.identity
    whole = identity["cpus"] + identity.get("slow_cores", 0) >= identity["cores"]
    return machine.is_virtual() or identity["quota_cpus"] is not None or not whole
