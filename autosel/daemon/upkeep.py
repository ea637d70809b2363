"""Run the daemon's periodic duties: record faults, publish other processes' writes, find decisions that no longer
hold."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from autosel import resources
from autosel.candidates import registry
from autosel.daemon.hub import Facts, Hub
from autosel.daemon.jobs import Full
from autosel.devices.cuda import nvml
from autosel.errors import AutoselError
from autosel.ledger import faults, intake, server, snapshot
from autosel.ledger.faults import Fault
from autosel.ledger.key import at_threads, threads_of
from autosel.tuning import underway
from autosel.values import WHOLE_STEP, Decision

log = logging.getLogger(__name__)

LOOK_S = 0.2  # with the half second of a client's own check, a fault reaches every client within a second
COMMANDS_EVERY = 5  # looks
SOURCES_S = 5.0
RATES_S = 3600.0  # checking the rates uses the device for 0.1 s, and starts torch
AGAIN_S = 5.0  # pause before faults that could not be recorded are tried again
LISTEN_AGAIN_S = 1.0
FACTS = tuple(field.name for field in fields(Facts))
LIBRARIES = ("torch", "triton", "apache-tvm-ffi", "autosel-kernels")


async def watch(hub: Hub) -> None:
    """Loop: move faults into the ledger, and show another process's snapshot and command."""
    seen_faults, seen_snapshot, again_s = 0, (0, 0), 0.0
    looks = 0
    while True:
        stamp = faults.stamp(hub.home)
        if stamp != seen_faults or (again_s and time.monotonic() > again_s):
            seen_faults = stamp
            await take_in(hub)
            again_s = time.monotonic() + AGAIN_S if faults.pending(hub.home) else 0.0  # the disk may have been full
        shown = _stamp(hub.home / snapshot.FILE)
        if shown != seen_snapshot:
            seen_snapshot = shown
            with suppress(AutoselError):
                await hub.reload()
        looks += 1
        if looks % COMMANDS_EVERY == 0:
            hub.see(await asyncio.to_thread(underway.commands, hub.home))
        await asyncio.sleep(LOOK_S)


async def tune(hub: Hub) -> None:
    await hub.jobs.run()


async def listen(hub: Hub) -> None:
    """Loop, if the ledger is on a server: publish other hosts' decisions here at once.

    A broken line loses nothing: decisions are published again when it is back.
    """
    while hub.ledger.shared:
        try:
            async for _ in server.changes(hub.ledger.url):
                await hub.read(lambda ledger: ledger.publish())
                await hub.reload()
        except AutoselError as error:
            log.warning("%s: %s", error.what, error.why)
        await asyncio.sleep(LISTEN_AGAIN_S)


async def take_in(hub: Hub) -> list[Fault]:
    """Record the journal of faults. When this returns they are quarantined or demoted, and reported."""

    try:
        taken: list[Fault] = await hub.write(intake.take_in, alone=True)
    except AutoselError as error:
        log.warning("faults wait: %s", error)
        return []
    if taken:
        await hub.reload()  # first, because a client that hears of a fault may ask at once for the current decision
    for fault in taken:
        hub.metrics.faults.labels(fault.cause).inc()
        hub.events.tell("fault", summary(fault))
    return taken


def summary(fault: Fault) -> dict[str, Any]:
    d = fault.decision
    who = {"op": d.op, "bucket": d.bucket, "candidate": fault.arm.candidate, "decision_id": d.id}
    return {"id": fault.id, "cause": fault.cause, "reason": fault.reason, "seen_at": fault.seen_at, **who}


# --- does what serves still hold? ---------------------------------------------------------------------------------


async def look_after(hub: Hub) -> None:
    """Loop: whenever sources or libraries change, find decisions that no longer hold, and queue them; now and then,
    while the device is idle, check its rates."""
    seen, rates_at = "", time.monotonic() + RATES_S
    while True:
        now = await asyncio.to_thread(software)
        idle = hub.options.tune and hub.jobs.live is None and not hub.jobs.meter.why(hub.jobs.busy_limit)
        if now != seen:
            seen = now
            await examine(hub)
        elif idle and time.monotonic() >= rates_at:
            rates_at = time.monotonic() + RATES_S
            await examine(hub, rates=True)
        await asyncio.sleep(SOURCES_S)


async def examine(hub: Hub, *, rates: bool = False) -> None:
    looked_at = await hub.jobs.examine(rates=rates)
    for found in looked_at:
        hub.learn(Facts(**{name: found[name] for name in FACTS}))
    if looked_at and hub.options.tune:
        hub.jobs.lost = {number: found["device"] for found in looked_at for number in found["lost"]}
    await hub.reload()  # queue for these devices, now that they are known
    for found in looked_at if hub.options.tune else ():
        for decision in hub.view.here:
            why = found["stale"].get(str(decision.id)) or found["other_knobs"].get(str(decision.id))
            if why and decision.mode == at_threads(found["mode"], threads_of(decision.mode)):
                threads = 0 if decision.mode == found["mode"] else threads_of(decision.mode)
                race_again(hub, decision, why, found["device"], threads)


def race_again(hub: Hub, decision: Decision, why: str, device: str, threads: int = 0) -> None:
    if decision.op == WHOLE_STEP:
        return  # the decoder races its steps itself, with the model's weights
    try:
        hub.jobs.add(decision.workload, "stale", why, device=device, threads=threads)
    except Full as error:
        log.warning("%s is not raced again: %s", decision.bucket, error)


def software() -> str:
    """Return a value that changes with a kernel's source, a library that decisions depend on, or the GPU's driver."""
    parts = [f"{path}:{info.st_mtime_ns}:{info.st_size}" for path, info in _sources(resources.kernels())]
    for name in (*LIBRARIES, *_backends()):
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {distribution(name).version}")
    parts.append(f"driver {nvml.driver()}")
    return "\n".join(parts)


@cache
def _backends() -> tuple[str, ...]:
    """Return distributions whose kernels may be installed."""
    found = {c.library.distribution for c in registry.own_candidates() if hasattr(c, "library")}
    return tuple(sorted(found))


def _sources(folder: Path) -> list[tuple[str, os.stat_result]]:
    found = []
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            if not name.endswith(".pyc"):
                with suppress(OSError):
                    found.append((f"{place}/{name}", Path(place, name).stat()))
    return sorted(found)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        info = path.stat()
    except OSError:
        return (0, 0)
    return info.st_ino, info.st_mtime_ns
