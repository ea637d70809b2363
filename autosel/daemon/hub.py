"""Hold the daemon's parts, for handlers, pages and upkeep."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from autosel import devices
from autosel.daemon.events import Events
from autosel.daemon.examination import Examination
from autosel.daemon.jobs import CPU, Jobs, QueuedJob
from autosel.daemon.metrics import Metrics
from autosel.daemon.uses import Coverages, UseCounts
from autosel.daemon.view import View
from autosel.daemon.writer import Work, Writer
from autosel.ledger.describe import decision_json
from autosel.ledger.key import at_threads, matters
from autosel.ledger.store import Ledger, Served, open_ledger
from autosel.tuning.underway import RunningCommand
from autosel.values import Decision, to_json

log = logging.getLogger(__name__)

CATCH_UP_S = 1.0  # time within which clients see a decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Set how the daemon was started. `busy_limit`: cores that other work may use while it tunes; `tune` False: never
    tune; `tcp`: HOST:PORT or empty; `origins`: pages that may make changes from a browser, with the token."""

    busy_limit: float = 0.5
    tune: bool = True
    tcp: str = ""
    origins: tuple[str, ...] = ()
    address: str = ""  # of the dashboard, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Describe a device and its software, as found by a child; empty until then."""

    device: str = "cpu"
    unit: str = ""  # distinguishes equal ones: a GPU's UUID
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    hw_id: str = ""
    env_id: str = ""
    mode: str = ""
    stale: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)  # bytes moved per call, by decision


class Hub:
    """Hold everything. Created in the event loop's thread, by `serve` or a test; `close` ends it."""

    def __init__(self, home: Path, options: Options) -> None:
        self.home, self.options = home, options
        self.instance = secrets.token_hex(8)  # of a new daemon: reports to the previous one may be lost
        self.started = datetime.now(UTC)
        self.loop = asyncio.get_running_loop()
        self.metrics, self.events, self.examination = Metrics(), Events(), Examination()
        self.metrics.started.set(time.time())
        self.uses, self.coverages = UseCounts(), Coverages()
        self.facts = Facts(hw_id=this_device())
        self.known = {self.facts.device: self.facts}  # of every device here
        self.view = View(hw_id=self.facts.hw_id)
        self.writer = Writer(_open(home), lambda: _open(home), self._committed)
        self.jobs = Jobs(
            home / "run" / "jobs.json", busy_limit=self.options.busy_limit, tell=self.events.tell, ended=self._tuned
        )
        self.commands: list[RunningCommand] = []  # that other processes of this home run
        self._reloading = asyncio.Lock()
        self._wanted = False

    @property
    def ledger(self) -> Ledger:
        """Return the ledger for reading; writing goes through `write`."""
        return self.writer.ledger

    async def write(self, work: Work, *, alone: bool = False) -> Any:
        """Write to the ledger: on disk and published when this returns."""
        return await self.writer.submit(work, alone=alone)

    async def read(self, work: Callable[[Ledger], Any]) -> Any:
        return await asyncio.to_thread(work, self.ledger)

    def _committed(self, writes: int, published: bool) -> None:
        """Note a commit. Called in the writer's thread, before any caller is notified."""
        self.metrics.writes.inc(writes)
        self.metrics.commits.inc()
        if published and not self._wanted:
            self._wanted = True
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._catch_up()))

    @property
    def behind(self) -> bool:
        """Return True if `view` may lack an acknowledged decision."""
        return self._wanted or self._reloading.locked()

    async def caught_up(self) -> None:
        """Update `view` so that it contains all acknowledged decisions; a disk that hangs delays no answer."""
        await asyncio.wait([asyncio.ensure_future(self._catch_up())], timeout=CATCH_UP_S)

    async def _catch_up(self) -> None:
        async with self._reloading:
            if self._wanted:
                await self._look()

    async def reload(self) -> None:
        """Read the current decisions, and report changes."""
        async with self._reloading:
            await self._look()

    async def _look(self) -> None:
        self._wanted = False
        served, waiting, unfinished = await self.read(_serving)
        here = {(f.hw_id, f.mode): name for name, f in reversed(self.known.items())}  # the first of equal ones
        places = ((d.id, here.get((d.hw_id, d.mode))) for d in waiting)
        self.jobs.offered = {number: place for number, place in places if place}
        rest = ((d.id, here.get((d.hw_id, d.mode))) for d in unfinished)
        self.jobs.incomplete = {number: place for number, place in rest if place}
        before, epoch = self.view, max((s.epoch for s in served), default=0)
        known = {(s.key, s.epoch, s.decision.id) for s in before.served}
        if epoch == before.epoch and {(s.key, s.epoch, s.decision.id) for s in served} == known:
            return
        self.view = replace(before, epoch=epoch, served=served, _answers={})
        self.jobs.end_decided(self.decided)
        for s in served:
            if before.epoch and (s.key, s.epoch, s.decision.id) not in known:
                self.events.tell("decision", {**decision_json(s.decision), "recorded": s.decision.state})
        self.events.tell("epoch", {"epoch": epoch})

    def see(self, commands: list[RunningCommand]) -> None:
        """Keep the commands that run now, and report a change."""
        if commands != self.commands:
            self.commands = commands
            self.events.tell("commands", to_json(commands))

    def learn(self, facts: Facts) -> None:
        self.known[facts.device] = facts
        self.facts = self.known[CPU]
        self.jobs.know(facts.device, facts.unit)
        stale = {number: why for f in self.known.values() for number, why in f.stale.items()}
        others = {f.hw_id: name for name, f in reversed(self.known.items()) if f.hw_id != self.facts.hw_id}
        own = self.facts
        self.view = replace(self.view, hw_id=own.hw_id, others=others, mode=own.mode, stale=stale, _answers={})
        self.jobs.end_decided(self.decided)
        self.events.tell("facts", {"device": facts.device, "stale": stale})

    @property
    def cores(self) -> int:
        """Return the usable cores of this CPU; 0 until it has been examined."""
        fp = self.facts.fingerprint
        return int(fp.get("threads", 0) or fp["identity"].get("cpus", 0)) if fp else 0

    def decided(self, device: str, bucket: str, threads: int) -> int | None:
        """Return the decision that serves a bucket on a device to processes with so many threads (0: as many as this
        daemon's); None without one, or if it is stale or waits for a race."""
        if device not in self.known or not self.view.mode:
            return None
        kind, hw_id = device.partition(":")[0], self.known[device].hw_id
        own = matters(at_threads(self.view.mode, threads), kind, bucket)
        same = [d for d in self.view.here if (d.bucket, d.hw_id) == (bucket, hw_id) and not d.stale]
        same = [d for d in same if matters(d.mode, kind, bucket) == own]
        return next((d.id for d in same if str(d.id) not in self.view.stale), None)

    def device_of(self, hw_id: str) -> str:
        """Return the device here with this identity; "" if there is none. Of equal ones, the one that others use
        least."""
        found = [name for name, facts in self.known.items() if facts.hw_id == hw_id]
        meters = self.jobs.meters
        return min(found, key=lambda name: meters[name].busy if name in meters else 0.0, default="")

    @property
    def moved(self) -> dict[str, int]:
        """Return the bytes moved per call, by decision."""
        return {number: size for f in self.known.values() for number, size in f.moved.items()}

    def _tuned(self, job: QueuedJob) -> None:
        self.metrics.tuned.labels(job.state).inc()

    def figures(self) -> bytes:
        """Return the current figures for Prometheus."""
        m, view = self.metrics, self.view
        m.waiting.set(self.writer.waiting)
        m.read_only.set(self.writer.read_only)
        m.epoch.set(view.epoch)
        m.stale.set(len(view.off) + len(view.renewed))
        m.streams.set(self.events.readers)
        m.others.set(self.jobs.meter.busy)
        gauges: list[tuple[Gauge, Mapping[str, float]]]
        gauges = [(m.serving, view.states()), (m.speedup, view.speedups()), (m.contended, view.contended())]
        gauges += [(m.read, view.read_rates()), (m.measured, view.measured())]
        for gauge, values in gauges:
            gauge.clear()
            for name, value in values.items():
                gauge.labels(name).set(value)
        m.jobs.clear()
        for job in self.jobs.all():
            m.jobs.labels(job.state).inc()
        return m.text()

    async def close(self) -> None:
        """Close: acknowledged writes are on disk, the running tune ends, and no caller is kept waiting."""
        self.events.close()
        await self.jobs.stop()
        await asyncio.to_thread(self.writer.close)
        self.ledger.close()


def _open(home: Path) -> Ledger:
    made = open_ledger(home=home, alone=True)
    made.keep_line()
    return made


def _serving(ledger: Ledger) -> tuple[tuple[Served, ...], list[Decision], list[Decision]]:
    """Read this host's decisions, those that wait for a proof, and those that wait for the rest of one."""
    everything = ledger.serving(everywhere=True)
    waiting = [s.decision for s in everything if not s.usable]
    served = ledger.serving() if waiting else everything
    return served, waiting, [decision for decision, _ in ledger.incomplete()]


def this_device() -> str:
    """Return this machine's hw_id, without measuring."""
    return devices.this_device().hw_id
