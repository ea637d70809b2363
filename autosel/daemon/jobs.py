"""Tune the queue one batch at a time, in a child process, while the device is idle.

A workload is tuned once, however many clients miss it. The queue is on disk before a job is acknowledged. After a kill,
interrupted jobs are queued again, and their decided workloads take no time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from autosel import files, settings
from autosel.daemon import idle
from autosel.errors import AutoselError
from autosel.ledger.durable import replace_private
from autosel.values import Workload, from_json, parse_json, to_json

log = logging.getLogger(__name__)

Source = Literal["miss", "asked", "stale"]
State = Literal["queued", "running", "paused", "done", "undecided", "failed", "cancelled"]
OPEN: tuple[State, ...] = ("queued", "running", "paused")
ASKING_FIRST: dict[Source, int] = {"asked": 0, "stale": 1, "miss": 2}

CPU = "cpu"
MOST_OPEN = 256
KEPT = 200  # ended jobs that are still shown
BATCH = 8  # workloads that share the processes of one tune
AGAIN_S = 3600.0  # pause before a miss that could not be decided is tried again
LOOK_S = 1.0
ADOPT_AGAIN_S = 60.0
BROKEN_AGAIN_S = 60.0  # pause before checking whether a broken environment is repaired
BUSY_LOOKS = 3  # consecutive readings with other work before a tune is paused, and without it before it continues
STOP_S = 8.0
MOST_LINE = 1 << 20
MOST_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """Describe a workload to tune. Times are UTC, ISO 8601."""

    id: int
    workload: Workload
    device: str = "cpu"  # as `tune --device` calls it
    threads: int = 0  # of the processes that it is for; 0: as many as the daemon's tuner has
    source: Source
    reason: str
    state: State = "queued"
    calls: int = 0  # calls of clients without a decision
    force: bool = False
    created_at: str
    started_at: str = ""
    ended_at: str = ""
    note: str = ""
    decision_id: int | None = None


@dataclass(slots=True, kw_only=True)
class Live:
    """Hold the last messages of the running tune."""

    stage: str = ""
    detail: str = ""
    done: int = 0
    total: int = 0
    started_s: float = field(default_factory=time.monotonic)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    decided: int = 0
    races: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # by workload and candidate

    def document(self) -> dict[str, Any]:
        elapsed = time.monotonic() - self.started_s
        return {
            "stage": self.stage,
            "detail": self.detail,
            "done": self.done,
            "total": self.total,
            "decided": self.decided,
            "seconds": round(elapsed, 1),
            "rejected": self.rejected[-50:],
            "races": list(self.races.values())[-64:],
        }


class Full(AutoselError):
    """Raised if the queue is full."""


class Jobs:
    """Manage the queue. Only for the event loop's thread. `tell(kind, value)` is called at each change, `ended(job)`
    when a job ends."""

    def __init__(
        self,
        path: Path,
        *,
        busy_limit: float,
        tell: Callable[[str, Any], None],
        ended: Callable[[QueuedJob], None],
    ) -> None:
        self.path, self.busy_limit = path, busy_limit
        self.meters: dict[str, idle.BusyMeter | idle.GpuMeter] = {CPU: idle.BusyMeter()}
        self.live: Live | None = None
        self.held = ""  # why no tune runs now
        self._tell, self._ended = tell, ended
        self._jobs: dict[int, QueuedJob] = {}
        self._child: asyncio.subprocess.Process | None = None  # the device that is being tuned
        self._children: set[asyncio.subprocess.Process] = set()
        self._cancelled: set[int] = set()
        self._again_at: dict[tuple[str, str, int], float] = {}  # by device, bucket and threads
        self._stopping = False
        self.offered: dict[int, str] = {}  # by device: decisions of other hosts that wait for a proof here
        self.incomplete: dict[int, str] = {}  # by device: decisions whose proof left out rows of an array
        self.refused: set[int] = set()  # those that this daemon has tried
        self.lost: dict[int, str] = {}  # by device: stale winners, which are proven again before they are raced
        self._broken: dict[str, tuple[float, str]] = {}  # by device: time until which no tune runs, and why
        self._not_before: dict[str, float] = {}  # pause before repeating a duty that failed on a device
        self._load()

    # --- the queue --------------------------------------------------------------------------------------------------

    def all(self) -> list[QueuedJob]:
        """Return open jobs in the order of tuning, then ended ones, latest first."""
        jobs = list(self._jobs.values())
        ended = sorted((j for j in jobs if j.state not in OPEN), key=lambda j: (j.ended_at, j.id), reverse=True)
        return [*sorted((j for j in jobs if j.state in OPEN), key=_turn), *ended]

    def get(self, job_id: int) -> QueuedJob | None:
        return self._jobs.get(job_id)

    @property
    def meter(self) -> idle.BusyMeter:
        """Return the CPU's meter."""
        found = self.meters[CPU]
        assert isinstance(found, idle.BusyMeter)
        return found

    def know(self, device: str, unit: str) -> None:
        """Register a device; a GPU by its UUID."""
        if device not in self.meters:
            self.meters[device] = idle.GpuMeter(device, unit)

    def add(
        self,
        workload: Workload,
        source: Source,
        reason: str,
        *,
        calls: int = 0,
        force: bool = False,
        device: str = CPU,
        threads: int = 0,
    ) -> QueuedJob | None:
        """Return the open job for the workload's bucket on a device with so many threads, adding one if there is none;
        it is on disk when this returns. Return None for a miss that was tried recently. Raises Full."""
        own = (device, workload.bucket, threads)
        known = next((j for j in self._jobs.values() if j.state in OPEN and _place(j) == own), None)
        if known is not None:
            made = replace(known, calls=known.calls + calls, force=known.force or force)
            if ASKING_FIRST[source] < ASKING_FIRST[known.source] and known.state == "queued":
                made = replace(made, source=source, reason=reason)
        elif source != "asked" and time.monotonic() < self._again_at.get(own, 0.0):
            return None
        elif sum(j.state in OPEN for j in self._jobs.values()) >= MOST_OPEN:
            raise Full("the queue is full", why=f"{MOST_OPEN} workloads wait", todo="they are tuned as time allows")
        else:
            number = max(self._jobs, default=0) + 1
            made = QueuedJob(
                id=number,
                workload=workload,
                device=device,
                threads=threads,
                source=source,
                reason=reason,
                calls=calls,
                force=force,
                created_at=_now(),
            )
        self._put(made, save=known is None or made.source != known.source or made.force != known.force)
        return made

    def cancel(self, job_id: int) -> QueuedJob | None:
        """Cancel a job. A queued job ends at once; a running one with its batch, whose other jobs are queued again."""
        job = self._jobs.get(job_id)
        if job is None or job.state not in OPEN:
            return job
        if job.state == "queued":
            return self._end(job, "cancelled", "cancelled before it began")
        self._cancelled.add(job_id)
        self._order("stop")
        return job

    def end_decided(self, decided: Callable[[str, str, int], int | None]) -> None:
        """End queued jobs that another process has decided. `decided`: the decision for a device, bucket and number of
        threads; None without one."""
        for job in [j for j in self._jobs.values() if j.state == "queued" and not j.force]:
            number = decided(*_place(job))
            if number is not None:
                self._end(job, "done", "decided by another process", number)

    def _put(self, job: QueuedJob, *, save: bool = True) -> QueuedJob:
        self._jobs[job.id] = job
        ended = sorted((j for j in self._jobs.values() if j.state not in OPEN), key=lambda j: j.id)
        for old in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[old.id]
        if save:
            self._save()
        self._tell("job", document(job))
        return job

    def _end(self, job: QueuedJob, state: State, note: str, decision_id: int | None = None) -> QueuedJob:
        if state in ("undecided", "failed"):
            self._again_at[_place(job)] = time.monotonic() + AGAIN_S
        made = self._put(replace(job, state=state, note=note, decision_id=decision_id, ended_at=_now()))
        self._ended(made)
        return made

    def _save(self) -> None:
        """Replace the file. If the disk refuses it, the queue is lost at a restart, and nothing else."""
        try:
            replace_private(self.path, json.dumps([to_json(j) for j in self._jobs.values()]))
        except OSError as error:
            log.warning("the queue cannot be stored: %s", error)

    def _load(self) -> None:
        try:
            found = parse_json(files.read(self.path, MOST_FILE_BYTES), what=str(self.path))
            jobs = from_json(tuple[QueuedJob, ...], found)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("the stored queue cannot be read, and starts empty: %s", error)
            return
        for job in jobs:
            again = job.state in ("running", "paused")
            self._jobs[job.id] = replace(job, state="queued", note="the daemon ended meanwhile") if again else job

    # --- tuning -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Loop: whenever a device is idle and has work, tune one batch, one device at a time."""
        while not self._stopping:
            await self._look()
            await self._next()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Take readings in a thread, because a driver may be slow to answer and lookups must continue."""
        for meter in list(self.meters.values()):
            await asyncio.to_thread(meter.look, time.monotonic())

    async def _next(self) -> None:
        """Choose the next work: stale winners, so that they serve again; then the queue; then decisions of other
        hosts; then the rest of proofs."""
        waiting = sorted((j for j in self._jobs.values() if j.state == "queued"), key=_turn)
        free = {device for device in self.meters if not self._why_held(device)}
        turn = next((j for j in waiting if j.device in free), None)
        self.held = self._why_held(waiting[0].device) if waiting and turn is None else ""
        offered = {number: device for number, device in self.offered.items() if number not in self.refused}
        if lost := self._due(self.lost, free):
            await self._renew(lost)
        elif turn is not None:
            same = [j for j in waiting if (j.device, j.threads, j.force) == (turn.device, turn.threads, turn.force)]
            await self._tune(same[:BATCH])
        elif other := self._due(offered, free):
            await self._adopt(other)
        elif unfinished := self._due(self.incomplete, free):
            await self._complete(unfinished)

    def _due(self, wanted: Mapping[int, str], free: Collection[str]) -> str:
        """Return the device of the first of these decisions that is free and did not just refuse; or ""."""
        now = time.monotonic()
        ready = (d for d in wanted.values() if d in free and now > self._not_before.get(d, 0.0))
        return next(ready, "")

    def _why_held(self, device: str) -> str:
        until, broken = self._broken.get(device, (0.0, ""))
        if time.monotonic() < until:
            return broken
        meter = self.meters.get(device)
        return meter.why(self.busy_limit) if meter is not None else f"{device} is not here"

    async def _tune(self, batch: Sequence[QueuedJob]) -> None:
        self.live = Live()
        running = {j.workload.key: self._put(replace(j, state="running", started_at=_now(), note="")) for j in batch}
        task = {
            "do": "tune",
            "workloads": [to_json(j.workload) for j in batch],
            "effort": "quick",
            "force": batch[0].force,
            "device": batch[0].device,
            "threads": batch[0].threads,
        }
        problem: dict[str, Any] = {}
        decided: dict[str, dict[str, Any]] = {}

        def hear(said: dict[str, Any]) -> None:
            if said["event"] == "error":
                problem.update(said)
            elif said["event"] == "decided":
                decided[said["bucket"]] = said
            self._hear(said)

        pauser = asyncio.ensure_future(self._pause_for_others(running, batch[0].device))
        try:
            code = await self._child_runs(task, hear)
        finally:
            pauser.cancel()
            self.live = None
            self._tell("live", None)
        for job in [self._jobs[j.id] for j in running.values()]:
            self._settle(job, decided.get(job.workload.bucket), problem, code)

    def _settle(self, job: QueuedJob, said: dict[str, Any] | None, problem: dict[str, Any], code: int) -> None:
        """Update a job of a batch that ended."""
        if said is not None:
            undecided = said["outcome"] == "undecided"
            self._end(job, "undecided" if undecided else "done", said["outcome"] or "not raced", said["id"])
        elif job.id in self._cancelled:
            self._cancelled.discard(job.id)
            self._end(job, "cancelled", "cancelled while it ran; finished proofs are kept")
        elif problem.get("kind") == "EnvironmentFault":  # says nothing about the workload, which waits for a repair
            self._broken[job.device] = time.monotonic() + BROKEN_AGAIN_S, str(problem["what"])
            self._put(replace(job, state="queued", note=": ".join(str(problem[n]) for n in ("what", "why"))))
        elif self._stopping or problem.get("kind") == "InUseError" or code == 130:
            self._put(replace(job, state="queued", note=str(problem.get("why", "")) or "stopped; continues later"))
        else:
            note = ": ".join(str(problem[n]) for n in ("what", "why") if problem.get(n))
            self._end(job, "failed", note or (f"the tuning process ended with {code}" if code else "left undecided"))

    def _hear(self, said: dict[str, Any]) -> None:
        live = self.live
        if live is None:
            return
        if said["event"] == "stage":
            live.stage, live.detail = said["name"], said["detail"]
            live.done, live.total = said["done"], said["total"]
        elif said["event"] == "pairs":
            told = {n: said[n] for n in ("workload", "candidate", "stage", "pairs", "median", "lo", "hi")}
            live.races[said["workload"], said["candidate"]] = told
        elif said["event"] == "rejected":
            live.rejected.append({n: said[n] for n in ("workload", "candidate", "stage", "reason")})
            del live.rejected[:-200]
        elif said["event"] == "decided":
            live.decided += 1
            live.races = {who: row for who, row in live.races.items() if who[0] != said["workload"]}
        self._tell("live", live.document())

    async def _pause_for_others(self, running: dict[str, QueuedJob], device: str) -> None:
        """Pause the tune while other work runs on its device."""
        looks, paused = 0, False
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()
            looks = looks + 1 if bool(self._why_held(device)) != paused else 0
            if looks < BUSY_LOOKS:
                continue
            looks, paused = 0, not paused
            self._order("pause" if paused else "resume")
            self.held = self._why_held(device) if paused else ""
            for job in running.values():
                now = self._jobs[job.id]
                if now.state in OPEN:
                    self._put(replace(now, state="paused" if paused else "running", note=self.held), save=False)

    def _order(self, word: str) -> None:
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError, RuntimeError):
                self._child.stdin.write(f"{word}\n".encode())

    async def _adopt(self, device: str) -> None:
        """Prove decisions of other hosts. A decision that was refused is not tried again by this daemon."""

        def take(said: dict[str, Any]) -> None:
            if said["reason"]:
                self.refused.add(said["id"])

        await self._proven("adopt", device, "adopted", take)

    async def _complete(self, device: str) -> None:
        """Finish some proofs. An arm that fails is quarantined by the child."""
        before = len(self.incomplete)
        pauser = asyncio.ensure_future(self._pause_for_others({}, device))
        try:
            done = await self._proven(
                "complete", device, "completed", lambda said: self.incomplete.pop(said["id"], None)
            )
        finally:
            pauser.cancel()
        if done and len(self.incomplete) == before:  # the ledger knows of none
            self.incomplete = {number: other for number, other in self.incomplete.items() if other != device}

    async def _proven(self, duty: str, device: str, event: str, take: Callable[[dict[str, Any]], object]) -> bool:
        """Let a child prove decisions; `take` gets its message, an `event`, about each. Return True if the child
        finished; otherwise another process has the device or the child failed, and it is repeated later."""

        def hear(said: dict[str, Any]) -> None:
            if said["event"] == event:
                log.info("decision %d: %s", said["id"], said["reason"] or event)
                take(said)
                self._tell(event, {name: value for name, value in said.items() if name != "event"})

        done = await self._child_runs({"do": duty, "device": device}, hear) == 0
        if not done:
            self._not_before[device] = time.monotonic() + ADOPT_AGAIN_S
        return done

    async def _renew(self, device: str) -> None:
        """Prove winners again that a change made stale. This takes seconds; then they serve until they are raced. One
        that fails is tried again only after the next change."""
        if await self._proven("renew", device, "renewed", lambda said: self.lost.pop(said["id"], None)):
            self.lost = {number: other for number, other in self.lost.items() if other != device}

    async def examine(self, *, rates: bool = False) -> list[dict[str, Any]]:
        """Let a child that loads the libraries examine each device and its decisions, the CPU first; with `rates`, also
        its current rates. No effect if it does not answer."""
        found: list[dict[str, Any]] = []
        problem: dict[str, Any] = {}

        def hear(said: dict[str, Any]) -> None:
            if said["event"] == "facts":
                found.append(said)
            elif said["event"] == "error":
                problem.update(said)

        code = await self._child_runs({"do": "examine", "rates": rates}, hear, aside=True)
        if code != 0:
            log.warning("a device could not be looked at (%s): %s", code, problem.get("what", "no answer"))
        return found

    async def _child_runs(
        self, task: dict[str, Any], hear: Callable[[dict[str, Any]], None], *, aside: bool = False
    ) -> int:
        """Run a child to its end, handling its messages; return its exit code. `aside`: do not send it orders."""
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "autosel.daemon.tuner"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=MOST_LINE,
                env=settings.passed_to_children(),
            )
        except OSError as error:
            log.warning("no tuning process can be started: %s", error)
            return 127
        if not aside:
            self._child = child
        self._children.add(child)
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(task).encode() + b"\n")
            await child.stdin.drain()
            async for line in child.stdout:
                with suppress(ValueError, KeyError):
                    hear(json.loads(line))
            return await child.wait()
        except (OSError, ValueError) as error:  # it died at its start, or wrote a line without an end
            log.warning("the tuning process broke off: %s", error)
            return await _ended(child)
        except asyncio.CancelledError:
            await _ended(child)
            raise
        finally:
            self._children.discard(child)
            if not aside:
                self._child = None

    async def stop(self) -> None:
        """End the running tune within seconds; its jobs wait for the next start."""
        self._stopping = True
        await asyncio.gather(*(_ended(child) for child in list(self._children)))


async def _ended(child: asyncio.subprocess.Process) -> int:
    """Ask a child to stop; after a timeout, kill it with its descendants (its workers end with it)."""
    if child.returncode is None:
        with suppress(OSError, RuntimeError):
            assert child.stdin is not None
            child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    return child.returncode or 0


def document(job: QueuedJob) -> dict[str, Any]:
    """Return a job as JSON."""
    found: dict[str, Any] = to_json(job)
    w = job.workload
    return {**found, "workload": w.key, "bucket": w.bucket, "op": w.op}


def _place(job: QueuedJob) -> tuple[str, str, int]:
    return job.device, job.workload.bucket, job.threads


def _turn(job: QueuedJob) -> tuple[int, int, int, int]:
    """Sort running jobs first, then requests, stale decisions, and misses by their count."""
    return (job.state == "queued", ASKING_FIRST[job.source], -job.calls, job.id)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
