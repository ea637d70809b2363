"""Handle what clients send: workloads to tune, misses, uses, coverage, and faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from autosel.daemon import jobs as queue
from autosel.daemon import upkeep
from autosel.daemon.answers import answer
from autosel.daemon.bodies import Bad, BodyLimits, number, read, refuse_odd, typed
from autosel.daemon.hub import Hub
from autosel.daemon.jobs import CPU
from autosel.daemon.uses import Covered, UseReport
from autosel.daemon.view import bucket_of
from autosel.errors import LedgerError
from autosel.ledger import faults
from autosel.ledger.faults import Fault
from autosel.ledger.key import at_threads, matters, threads_of
from autosel.ledger.store import Ledger
from autosel.values import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Report `calls` of a client without a decision."""

    workload: Workload
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Report misses, with the client's `hw_id` and `mode`: only measurements under these can serve it."""

    hw_id: str
    mode: str
    misses: tuple[Miss, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """List workloads to tune on a device of this machine; with `force`, also settled ones."""

    workloads: tuple[Workload, ...]
    device: str = "cpu"
    reason: str = "asked for"
    force: bool = False


async def job_list(hub: Hub, request: Request) -> Response:
    live = hub.jobs.live
    found = [queue.document(j) for j in hub.jobs.all()]
    return answer({"jobs": found, "held": hub.jobs.held, "tuning": live.document() if live else None})


async def job(hub: Hub, request: Request) -> Response:
    found = hub.jobs.get(number(request.path_params["id"], "id", 0, 1 << 53))
    if found is None:
        raise Bad(404, f"no such job: {request.path_params['id']}")
    return answer(queue.document(found))


async def ask(hub: Hub, request: Request) -> Response:
    if not hub.options.tune:
        raise Bad(409, "this daemon does not tune", todo="start it without --no-tune")
    asked: Ask = typed(Ask, await read(request, BodyLimits()))
    if not 1 <= len(asked.workloads) <= 64:
        raise Bad(422, f"{len(asked.workloads)} workloads", why="1 to 64 may be asked for at a time")
    for w in asked.workloads:
        refuse_odd(w)
    if asked.device not in hub.known:
        raise Bad(422, f"no such device here: {asked.device[:60]!r}", why=f"there is {', '.join(hub.known)}")
    made = [hub.jobs.add(w, "asked", asked.reason, force=asked.force, device=asked.device) for w in asked.workloads]
    return answer({"jobs": [queue.document(j) for j in made if j]}, 202)


async def cancel(hub: Hub, request: Request) -> Response:
    found = hub.jobs.cancel(number(request.path_params["id"], "id", 0, 1 << 53))
    if found is None:
        raise Bad(404, f"no such job: {request.path_params['id']}")
    return answer(queue.document(found))


async def misses(hub: Hub, request: Request) -> Response:
    """Queue workloads that clients call and that have no decision; they are tuned when the device is idle."""
    asked: Misses = typed(Misses, await read(request, BodyLimits()))
    if len(asked.misses) > 256:
        raise Bad(422, f"{len(asked.misses)} misses", why="at most 256 at a time")
    for miss in asked.misses:
        refuse_odd(miss.workload)
        if not 0 <= miss.calls <= 1 << 53:
            raise Bad(422, f"{miss.calls} calls")
    hub.metrics.misses.inc(sum(m.calls for m in asked.misses))
    refused, device = "", hub.device_of(asked.hw_id)
    if not device:
        refused = f"this is another device ({hub.view.hw_id[:12]}): measurements here would not serve there"
    elif asked.misses and not any(_measured_alike(hub, asked.mode, m, device) for m in asked.misses):
        refused = f"measured is {hub.view.mode}; a process that runs {asked.mode} is not served by it"
    elif not hub.options.tune:
        refused = "this daemon does not tune (serve --no-tune)"
    fit = [] if refused else [m for m in asked.misses if _measured_alike(hub, asked.mode, m, device)]
    queued = [q for m in fit if (q := _queue(hub, asked.mode, m, device)) is not None]
    return answer({"instance": hub.instance, "queued": queued, "refused": refused}, 202)


def _measured_alike(hub: Hub, mode: str, miss: Miss, device: str) -> bool:
    """Return True if measurements here would serve a process in that mode: a tune takes the process's number of
    threads, as long as this CPU has as many cores."""
    kind, bucket = device.partition(":")[0], miss.workload.key
    threads = threads_of(mode) if threads_of(mode) <= hub.cores else 0
    return not hub.view.mode or matters(mode, kind, bucket) == matters(at_threads(hub.view.mode, threads), kind, bucket)


def _queue(hub: Hub, mode: str, miss: Miss, device: str) -> int | None:
    bucket, _ = bucket_of(miss.workload.key)
    threads = threads_of(mode) if device == CPU and mode != hub.view.mode else 0
    if hub.decided(device, bucket, threads) is not None:
        return None  # decided meanwhile
    made = hub.jobs.add(miss.workload, "miss", "a client calls it", calls=miss.calls, device=device, threads=threads)
    return made.id if made else None


async def use_list(hub: Hub, request: Request) -> Response:
    return answer(hub.uses.document())


async def report_uses(hub: Hub, request: Request) -> Response:
    """Count how many calls each candidate served in one process since its last report."""
    asked: UseReport = typed(UseReport, await read(request, BodyLimits()))
    for told in hub.uses.take(asked, hub.view.here):
        hub.metrics.calls.labels(told.op, told.candidate).inc(told.calls)
    return answer({"instance": hub.instance}, 202)


async def coverage_list(hub: Hub, request: Request) -> Response:
    return answer(hub.coverages.document())


async def report_coverage(hub: Hub, request: Request) -> Response:
    """Keep a process's report of all its calls so far: who served them, and why the rest missed."""
    hub.coverages.take(typed(Covered, await read(request, BodyLimits())))
    return answer({"instance": hub.instance}, 202)


async def fault_list(hub: Hub, request: Request) -> Response:
    """List faults that wait to be stored, and quarantines."""

    def look(ledger: Ledger) -> dict[str, Any]:
        waiting = [upkeep.summary(f) for _, f in faults.pending(hub.home) if isinstance(f, Fault)]
        held = ledger.quarantined(hub.view.hw_id).values()
        return {
            "waiting": waiting,
            "quarantines": [
                {"id": q.id, "candidate": q.arm.candidate, "op": q.op, "cause": q.cause, "reason": q.reason}
                | {"digest": q.digest, "created_at": q.created_at, "evidence": dict(q.evidence)}
                for q in held
            ],
        }

    return answer(await hub.read(look))


async def report_fault(hub: Hub, request: Request) -> Response:
    """Record a fault of a served arm; when this returns, it serves no process any more."""
    fault: Fault = typed(Fault, await read(request, BodyLimits(text=4096)))
    if fault.cause == "unchecked":
        raise Bad(422, "a check that failed itself says nothing about the arm")
    d = fault.decision
    try:
        known = await hub.read(lambda ledger: ledger.decision(d.id))
    except LedgerError as error:
        raise Bad(404, error.what, why=error.why) from error
    if (known.hw_id, known.bucket, known.arm.digest) != (d.hw_id, d.bucket, d.arm.digest):
        raise Bad(409, f"decision {d.id} is another one here")
    try:
        path = await asyncio.to_thread(faults.write, hub.home, fault)
    except OSError as error:
        raise Bad(503, "the fault cannot be kept", why=str(error)) from error
    taken = await upkeep.take_in(hub)
    gone = not path.exists()
    if gone and not taken:  # the daemon's check of the journal, or another process, came first
        await hub.reload()
    return answer({"id": fault.id, "taken_in": gone}, 202)
