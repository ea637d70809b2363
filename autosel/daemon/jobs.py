"""What is to be tuned, one batch at a time, in a child process, while its device is idle.

A workload is tuned once however many clients miss it. The queue is on disk before a job is acknowledged; what a killed
daemon was at is queued again, and decided workloads cost it nothing.
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
AGAIN_S = 3600.0  # before a miss that could not be decided is tried again
LOOK_S = 1.0
ADOPT_AGAIN_S = 60.0
BROKEN_AGAIN_S = 60.0  # before a tune looks whether a broken environment is repaired
BUSY_LOOKS = 3  # looks in a row that find other work, before a tune is held; and as many without, before it goes on
STOP_S = 8.0
MOST_LINE = 1 << 20
MOST_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A workload to be tuned. Times are UTC, ISO 8601."""

    id: int
    workload: Workload
    device: str = "cpu"  # as `tune --device` calls it
    source: Source
    reason: str
    state: State = "queued"
    calls: int = 0  # of clients, that no decision covered
    force: bool = False
    created_at: str
    started_at: str = ""
    ended_at: str = ""
    note: str = ""
    decision_id: int | None = None


@dataclass(slots=True, kw_only=True)
class Live:
    """What the tune that is under way last said."""

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
    """So many workloads wait already."""


class Jobs:
    """For the event loop's thread alone. `tell(kind, value)` is called at each change, `ended(job)` when one ends."""

    def __init__(
        self,
        path: Path,
        *,
        busy_limit: float,
        tell: Callable[[str, Any], None],
        ended: Callable[[Job], None],
        effort: str = "quick",
    ) -> None:
        self.path, self.busy_limit, self.effort = path, busy_limit, effort
        self.meters: dict[str, idle.Meter | idle.GpuMeter] = {CPU: idle.Meter()}
        self.live: Live | None = None
        self.held = ""  # why nothing is tuned now
        self._tell, self._ended = tell, ended
        self._jobs: dict[int, Job] = {}
        self._child: asyncio.subprocess.Process | None = None  # the one that tunes
        self._children: set[asyncio.subprocess.Process] = set()
        self._cancelled: set[int] = set()
        self._again_at: dict[tuple[str, str], float] = {}  # by device and bucket
        self._stopping = False
        self.offered: dict[int, str] = {}  # decisions of other hosts that wait for a proof of this one, by device
        self.refused: set[int] = set()  # of these, what this daemon has tried
        self.lost: dict[int, str] = {}  # stale winners, by device: to be proven again before they are raced
        self._broken: dict[str, tuple[float, str]] = {}  # by device: until when nothing is tuned, and why
        self._not_before: dict[str, float] = {}  # a duty of a device, after one that broke off
        self._load()

    # --- the queue --------------------------------------------------------------------------------------------------

    def all(self) -> list[Job]:
        """Open ones first, in the order they will be taken, then those that ended, latest first."""
        jobs = list(self._jobs.values())
        ended = sorted((j for j in jobs if j.state not in OPEN), key=lambda j: (j.ended_at, j.id), reverse=True)
        return [*sorted((j for j in jobs if j.state in OPEN), key=_turn), *ended]

    def get(self, job_id: int) -> Job | None:
        return self._jobs.get(job_id)

    @property
    def meter(self) -> idle.Meter:
        """The CPU's."""
        found = self.meters[CPU]
        assert isinstance(found, idle.Meter)
        return found

    def know(self, device: str, unit: str) -> None:
        """There is this device; a GPU by its UUID."""
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
    ) -> Job | None:
        """The open job of the workload's bucket on a device, a new one if there is none; on disk when this returns.
        None: a miss that was tried not long ago. Raises Full."""
        own = (device, workload.bucket)
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
            made = Job(
                id=number,
                workload=workload,
                device=device,
                source=source,
                reason=reason,
                calls=calls,
                force=force,
                created_at=_now(),
            )
        self._put(made, save=known is None or made.source != known.source or made.force != known.force)
        return made

    def cancel(self, job_id: int) -> Job | None:
        """A queued job ends at once; one that runs, with the batch it belongs to: the others wait again."""
        job = self._jobs.get(job_id)
        if job is None or job.state not in OPEN:
            return job
        if job.state == "queued":
            return self._end(job, "cancelled", "cancelled before it began")
        self._cancelled.add(job_id)
        self._order("stop")
        return job

    def _put(self, job: Job, *, save: bool = True) -> Job:
        self._jobs[job.id] = job
        ended = sorted((j for j in self._jobs.values() if j.state not in OPEN), key=lambda j: j.id)
        for old in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[old.id]
        if save:
            self._save()
        self._tell("job", document(job))
        return job

    def _end(self, job: Job, state: State, note: str, decision_id: int | None = None) -> Job:
        if state in ("undecided", "failed"):
            self._again_at[_place(job)] = time.monotonic() + AGAIN_S
        made = self._put(replace(job, state=state, note=note, decision_id=decision_id, ended_at=_now()))
        self._ended(made)
        return made

    def _save(self) -> None:
        """Replace the file. A disk that cannot take it costs the queue its memory across a restart, nothing else."""
        making = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        text = json.dumps([to_json(j) for j in self._jobs.values()])
        try:
            with making.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            making.replace(self.path)
        except OSError as error:
            log.warning("the queue cannot be kept: %s", error)
            with suppress(OSError):
                making.unlink()

    def _load(self) -> None:
        try:
            found = parse_json(files.read(self.path, MOST_FILE_BYTES), what=str(self.path))
            jobs = from_json(tuple[Job, ...], found)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("the queue of the last time cannot be read, and starts empty: %s", error)
            return
        for job in jobs:
            again = job.state in ("running", "paused")
            self._jobs[job.id] = replace(job, state="queued", note="the daemon ended meanwhile") if again else job

    # --- tuning -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever: whenever a device is idle and something waits for it, work on one batch, one device at a time."""
        while not self._stopping:
            await self._look()
            await self._next()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """In a thread: a driver may take its time to answer, and lookups go on."""
        for meter in list(self.meters.values()):
            await asyncio.to_thread(meter.look, time.monotonic())

    async def _next(self) -> None:
        """Stale winners first, that they serve again; then the queue; then what other hosts decided."""
        waiting = sorted((j for j in self._jobs.values() if j.state == "queued"), key=_turn)
        free = {device for device in self.meters if not self._why_held(device)}
        turn = next((j for j in waiting if j.device in free), None)
        self.held = self._why_held(waiting[0].device) if waiting and turn is None else ""
        offered = {number: device for number, device in self.offered.items() if number not in self.refused}
        if lost := self._due(self.lost, free):
            await self._renew(lost)
        elif turn is not None:
            same = [j for j in waiting if (j.device, j.force) == (turn.device, turn.force)]
            await self._tune(same[:BATCH])
        elif other := self._due(offered, free):
            await self._adopt(other)

    def _due(self, wanted: Mapping[int, str], free: Collection[str]) -> str:
        """The device of the first of these decisions whose device is free, and was not just refused to us; or ""."""
        now = time.monotonic()
        ready = (d for d in wanted.values() if d in free and now > self._not_before.get(d, 0.0))
        return next(ready, "")

    def _why_held(self, device: str) -> str:
        until, broken = self._broken.get(device, (0.0, ""))
        if time.monotonic() < until:
            return broken
        meter = self.meters.get(device)
        return meter.why(self.busy_limit) if meter is not None else f"{device} is not here"

    async def _tune(self, batch: Sequence[Job]) -> None:
        self.live = Live()
        running = {j.workload.key: self._put(replace(j, state="running", started_at=_now(), note="")) for j in batch}
        task = {
            "do": "tune",
            "workloads": [to_json(j.workload) for j in batch],
            "effort": self.effort,
            "force": batch[0].force,
            "device": batch[0].device,
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

    def _settle(self, job: Job, said: dict[str, Any] | None, problem: dict[str, Any], code: int) -> None:
        """What became of a job of a batch that ended."""
        if said is not None:
            undecided = said["outcome"] == "undecided"
            self._end(job, "undecided" if undecided else "done", said["outcome"] or "not raced", said["id"])
        elif job.id in self._cancelled:
            self._cancelled.discard(job.id)
            self._end(job, "cancelled", "cancelled while it ran; what was proven is kept")
        elif problem.get("kind") == "EnvironmentFault":  # says nothing about the workload: it waits for a repair
            self._broken[job.device] = time.monotonic() + BROKEN_AGAIN_S, str(problem["what"])
            self._put(replace(job, state="queued", note=": ".join(str(problem[n]) for n in ("what", "why"))))
        elif self._stopping or problem.get("kind") == "InUseError" or code == 130:
            self._put(replace(job, state="queued", note=str(problem.get("why", "")) or "stopped; it goes on later"))
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

    async def _pause_for_others(self, running: dict[str, Job], device: str) -> None:
        """Hold the tune while other work is on its device."""
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
        """Prove what other hosts have decided. What was refused is not tried again by this daemon."""

        def hear(said: dict[str, Any]) -> None:
            if said["event"] == "adopted":
                log.info("decision %d of another host: %s", said["id"], said["reason"] or "adopted")
                self.refused |= {said["id"]} if said["reason"] else set()
                self._tell("adopted", {name: said[name] for name in ("id", "workload", "reason")})

        await self._proven({"do": "adopt", "device": device}, hear)

    async def _proven(self, task: dict[str, Any], hear: Callable[[dict[str, Any]], None]) -> bool:
        """Did the child come to its end? Else another process has the device, or it broke off: later again."""
        done = await self._child_runs(task, hear) == 0
        if not done:
            self._not_before[task["device"]] = time.monotonic() + ADOPT_AGAIN_S
        return done

    async def _renew(self, device: str) -> None:
        """Prove winners again that a change made stale: seconds, after which they serve until they are raced. One that
        does not pass is not tried again until something else changes."""

        def hear(said: dict[str, Any]) -> None:
            if said["event"] == "renewed":
                log.info("stale decision %d: %s", said["id"], said["reason"] or "proven again")
                self.lost.pop(said["id"], None)
                self._tell("renewed", {name: said[name] for name in ("id", "workload", "reason")})

        if await self._proven({"do": "renew", "device": device}, hear):
            self.lost = {number: other for number, other in self.lost.items() if other != device}

    async def examine(self, *, rates: bool = False) -> list[dict[str, Any]]:
        """What a child that loads the libraries finds out about each device and its decisions, the CPU first; with
        `rates`, also whether it is as fast as it was. Nothing where it does not answer."""
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
        """Run a child to its end, telling what it says; its exit code. `aside`: not one that orders are for."""
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
        except (OSError, ValueError) as error:  # it died as it started, or said a line without an end
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
        """The tune under way ends within seconds; its jobs wait for the next start."""
        self._stopping = True
        await asyncio.gather(*(_ended(child) for child in list(self._children)))


async def _ended(child: asyncio.subprocess.Process) -> int:
    """Ask it to stop; past its time, kill it with what it started (its workers end with it)."""
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


def document(job: Job) -> dict[str, Any]:
    """A job as JSON."""
    found: dict[str, Any] = to_json(job)
    w = job.workload
    return {**found, "workload": w.key, "bucket": w.bucket, "op": w.op}


def _place(job: Job) -> tuple[str, str]:
    return job.device, job.workload.bucket


def _turn(job: Job) -> tuple[int, int, int, int]:
    """Running first; then what was asked for, what is stale, and misses by how often they were missed."""
    return (job.state == "queued", ASKING_FIRST[job.source], -job.calls, job.id)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
