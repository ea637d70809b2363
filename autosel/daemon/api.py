"""Handle the addresses in /v1. The table at the end lists them all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from autosel.certify import store as certificates
from autosel.certify.certificate import decode as decode_certificate
from autosel.certify.derive import claimed_interval, headline_roofline
from autosel.certify.verify import not_checkable, verify
from autosel.daemon import jobs as queue
from autosel.daemon import metrics, upkeep
from autosel.daemon.access import is_local
from autosel.daemon.answers import answer
from autosel.daemon.bodies import Bad, Limits, number, query, read, refuse_odd, typed
from autosel.daemon.coverage import Covered
from autosel.daemon.events import MOST_READERS
from autosel.daemon.hub import Hub
from autosel.daemon.jobs import CPU
from autosel.daemon.uses import Report
from autosel.daemon.view import bucket_of
from autosel.errors import AutoselError, LedgerError
from autosel.ledger import commands, compare, faults, rows
from autosel.ledger import schema as t
from autosel.ledger.commands import Demote, Pin, Promote, Unpin
from autosel.ledger.describe import decision_json
from autosel.ledger.faults import Fault
from autosel.ledger.host import here as this_host
from autosel.ledger.key import at_threads, matters, threads_of
from autosel.ledger.store import Evidence, Ledger
from autosel.values import Decision, Race, Workload, to_json
from autosel.version import __version__

MOST_ROWS = 500
SAMPLES = {"samples": ""}


# --- what may be sent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Because:
    """Give a reason, which is stored with the decision."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Name a `candidate` that has passed parity for this decision; by default the decision's own."""

    reason: str
    candidate: str | None = None


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


# --- what it is -------------------------------------------------------------------------------------------------------


async def health(hub: Hub, request: Request) -> Response:
    queued = [j for j in hub.jobs.all() if j.state in queue.OPEN]
    return answer(
        {
            "status": "read-only" if hub.writer.read_only else "ok",
            "version": __version__,
            "instance": hub.instance,
            "pid": os.getpid(),
            "started_at": hub.started.isoformat(timespec="seconds"),
            "home": str(hub.home),
            "ledger": hub.ledger.name,
            "hw_id": hub.view.hw_id,
            "mode": hub.view.mode,
            "epoch": hub.view.epoch,
            "serving": hub.view.states(),
            "stale": len(hub.view.off) + len(hub.view.renewed),
            "jobs": len(queued),
            "held": hub.jobs.held,
            "tuning": hub.jobs.live.document() if hub.jobs.live else None,
            "devices": [device_json(hub, name) for name in hub.known],
            "others_busy_cores": round(hub.jobs.meter.busy, 2),
            "dashboard": hub.options.address,
        }
    )


def device_json(hub: Hub, name: str) -> dict[str, Any]:
    """Describe a device. `busy`: cores that other work uses, for a GPU its share of time; `held`: why no tune runs
    now."""
    facts, meter = hub.known[name], hub.jobs.meters.get(name)
    busy = round(meter.busy, 2) if meter else None
    held = meter.why(hub.jobs.busy_limit) if meter else ""
    return {"device": name, "hw_id": facts.hw_id, "unit": facts.unit, "busy": busy, "held": held}


async def fingerprint(hub: Hub, request: Request) -> Response:
    """Describe a device of this machine; `device` is named as in `tune --device`."""
    asked = query(request, {"device": "cpu"})
    facts = hub.known.get(asked["device"])
    if facts is None and hub.facts.fingerprint:
        raise Bad(404, f"no such device here: {asked['device'][:60]!r}", why=f"there is {', '.join(hub.known)}")
    if facts is None or not facts.fingerprint:
        raise Bad(503, "the device is being examined", todo="ask again in some seconds")
    return answer({"hw_id": facts.hw_id, "env_id": facts.env_id, **facts.fingerprint})


async def addresses(hub: Hub, request: Request) -> Response:
    """List the addresses of this table."""
    found = [{"method": e.method, "path": e.path, "summary": e.summary, "query": e.query} for e in ENDPOINTS]
    return answer({"version": __version__, "addresses": found})


async def metrics_text(hub: Hub, request: Request) -> Response:
    return Response(hub.figures(), headers={"content-type": metrics.TYPE})


async def events(hub: Hub, request: Request) -> Response:
    if hub.events.readers >= MOST_READERS or hub.events.closed:
        raise Bad(503, f"{hub.events.readers} lines of events are open", todo="close one")
    last = request.headers.get("last-event-id", "")
    after = int(last) if last.isascii() and last.isdecimal() and len(last) < 16 else None
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(hub.events.follow(after), media_type="text/event-stream", headers=headers)


# --- decisions --------------------------------------------------------------------------------------------------------


async def serving(hub: Hub, request: Request) -> Response:
    view = hub.view
    return answer({"epoch": view.epoch, "hw_id": view.hw_id, "serving": [view.document(d) for d in view.here]})


async def best(hub: Hub, request: Request) -> Response:
    """Look up decisions. `workload` is a workload's key or its bucket; `device` one of this machine's."""
    asked = query(request, {"workload": "", "device": ""})
    found = hub.view.lookup(request.path_params["op"], asked["workload"], asked["device"])
    return Response(found, media_type="application/json")


async def decisions(hub: Hub, request: Request) -> Response:
    asked = query(request, {"op": "", "limit": "", "before": ""})
    limit, before = number(asked["limit"], "limit", 100, MOST_ROWS), number(asked["before"], "before", 0, 1 << 53)
    found = await hub.read(lambda ledger: ledger.history(asked["op"] or None, limit=limit, before=before or None))
    return answer({"decisions": [{**decision_json(d), "recorded": d.state, "mode": d.mode} for d in found]})


async def decision(hub: Hub, request: Request) -> Response:
    return answer(evidence_json(await evidence_of(hub, request), hub.view.stale))


async def evidence_of(hub: Hub, request: Request) -> Evidence:
    """Return a decision's evidence. Raises Bad if there is no such decision."""
    wanted = number(request.path_params["id"], "id", 0, 1 << 53)
    try:
        found: Evidence = await hub.read(lambda ledger: ledger.evidence(wanted))
    except LedgerError as error:
        raise Bad(404, error.what, why=error.why) from error
    return found


def evidence_json(e: Evidence, stale: Mapping[str, str]) -> dict[str, Any]:
    d = e.decision
    return {
        **decision_json(d),
        "recorded": d.state,
        "hw_id": d.hw_id,
        "mode": d.mode,
        "serves": e.serves,
        "stale": stale.get(str(d.id), d.stale),
        "previous": e.previous.id if e.previous else None,
        "arm": to_json(d.arm),
        "baseline": to_json(d.baseline),
        "verdict": to_json(d.verdict),
        "race": race_json(e.race, samples=False) if e.race else None,
        "parities": [
            {"candidate": arm.candidate, "outcome": type(p).__name__.lower(), **to_json(p)} for arm, p in e.parities
        ],
    }


async def race(hub: Hub, request: Request) -> Response:
    """Return a race. `samples=1`: every sample of every session."""
    asked = query(request, SAMPLES)
    found = await evidence_of(hub, request)
    if found.race is None:
        raise Bad(404, f"decision {found.decision.id} rests on no race", why=found.decision.reason)
    return answer(race_json(found.race, samples=asked["samples"] == "1"))


def race_json(found: Race, *, samples: bool) -> dict[str, Any]:
    made: dict[str, Any] = to_json(found)
    if not samples:
        for session, of in zip(made["sessions"], found.sessions, strict=True):
            session["pairs"] = len(of.pairs)
    return {**made, "workload": found.workload.key}


async def races(hub: Hub, request: Request) -> Response:
    asked = query(request, {"op": "", "limit": ""})
    limit = number(asked["limit"], "limit", 50, MOST_ROWS)
    found = await hub.read(lambda ledger: [d for d in ledger.history(asked["op"] or None, limit=limit) if d.verdict])
    return answer(
        {
            "races": [
                {"decision_id": d.id, "op": d.op, "workload": d.workload.key, "created_at": d.created_at}
                | {"verdict": to_json(d.verdict)}
                for d in found
            ]
        }
    )


async def candidates(hub: Hub, request: Request) -> Response:
    asked = query(request, {"op": ""})
    return answer({"candidates": await hub.read(lambda ledger: arms(ledger, asked["op"], hub.view.hw_id))})


def arms(ledger: Ledger, op: str, hw_id: str) -> list[dict[str, Any]]:
    """List everything that was proven here (the latest proof of each build in each bucket), and the quarantines."""
    import sqlalchemy as sa

    p, c = t.parities.c, t.candidates.c
    latest = sa.select(sa.func.max(p.id)).where(p.hw_id == hw_id).group_by(p.candidate_id, p.scope)
    wanted = (
        sa.select(c.name, c.backend, c.digest, p.scope, p.outcome, p.document, p.created_at)
        .join(t.candidates, p.candidate_id == c.id)
        .where(p.id.in_(latest))
        .order_by(p.id.desc())
        .limit(2000)
    )
    if op:
        wanted = wanted.where(p.scope.startswith(f"{op}/", autoescape=True))
    held = ledger.quarantined(hw_id)
    with ledger.reading() as connection:
        return [
            {
                "candidate": r.name,
                "backend": r.backend,
                "digest": r.digest,
                "bucket": r.scope,
                "parity": r.outcome,
                "evidence": to_json(rows.parity_of(r.outcome, r.document)),
                "created_at": r.created_at,
                "quarantined": held[r.digest].reason if r.digest in held else "",
            }
            for r in connection.execute(wanted)
        ]


BY_HAND = {kind.call: kind for kind in (Demote, Promote, Pin, Unpin)}


async def change(hub: Hub, request: Request) -> Response:
    """Demote, promote, pin or unpin."""
    verb = request.url.path.rsplit("/", 1)[1]
    wanted = number(request.path_params["id"], "id", 0, 1 << 53)
    kind = Choice if verb in ("promote", "pin") else Because
    asked = typed(kind, await read(request, Limits()))
    if not asked.reason.strip():
        raise Bad(422, "a reason is needed", why="it is kept with the decision")
    candidate = getattr(asked, "candidate", None)
    if verb == "promote" and not candidate:
        raise Bad(422, "which candidate is to be promoted?", todo="name it in `candidate`")
    await evidence_of(hub, request)  # 404 for an unknown decision
    command = BY_HAND[verb](decision_id=wanted, reason=asked.reason, candidate=candidate)
    made: Decision = await hub.write(lambda ledger: ledger.write(command))
    await hub.reload()
    return answer({**decision_json(made), "recorded": made.state})


# --- jobs -------------------------------------------------------------------------------------------------------------


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
    _refuse_untuned(hub)
    asked: Ask = typed(Ask, await read(request, Limits()))
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
    asked: Misses = typed(Misses, await read(request, Limits()))
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
    stale, here = hub.view.stale, hub.known[device].hw_id
    threads = hub.threads_for(mode) if device == CPU else 0
    own = at_threads(hub.view.mode, threads)
    same = [d for d in hub.view.here if d.bucket == bucket and (d.hw_id, d.mode) == (here, own)]
    if any(str(d.id) not in stale for d in same):
        return None  # decided meanwhile
    made = hub.jobs.add(miss.workload, "miss", "a client calls it", calls=miss.calls, device=device, threads=threads)
    return made.id if made else None


def _refuse_untuned(hub: Hub) -> None:
    if not hub.options.tune:
        raise Bad(409, "this daemon does not tune", todo="start it without --no-tune")


async def use_list(hub: Hub, request: Request) -> Response:
    return answer(hub.uses.document())


async def report_uses(hub: Hub, request: Request) -> Response:
    """Count how many calls each candidate served in one process since its last report."""
    asked: Report = typed(Report, await read(request, Limits()))
    for told in hub.uses.take(asked, hub.view.here):
        hub.metrics.calls.labels(told.op, told.candidate).inc(told.calls)
    return answer({"instance": hub.instance}, 202)


async def coverage_list(hub: Hub, request: Request) -> Response:
    return answer(hub.coverages.document())


async def report_coverage(hub: Hub, request: Request) -> Response:
    """Keep a process's report of all its calls so far: who served them, and why the rest missed."""
    hub.coverages.take(typed(Covered, await read(request, Limits())))
    return answer({"instance": hub.instance}, 202)


# --- faults -----------------------------------------------------------------------------------------------------------


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
    fault: Fault = typed(Fault, await read(request, Limits(text=4096)))
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


# --- fleet ------------------------------------------------------------------------------------------------------------


async def fleet(hub: Hub, request: Request) -> Response:
    """Describe who shares this ledger, which decisions wait for a proof here, and which devices disagree."""
    query(request, {})
    return answer(await hub.read(lambda ledger: fleet_json(ledger, hub)))


def fleet_json(ledger: Ledger, hub: Hub) -> dict[str, Any]:
    own = this_host(hub.home).id
    serving = ledger.serving(everywhere=True)
    with ledger.reading() as connection:
        hosts, odd = compare.hosts(connection), compare.disagreements(connection)
    waiting = [s.decision.id for s in serving if not s.usable and s.decision.hw_id == hub.view.hw_id]
    odd = [_told_apart(d) for d in odd]
    return {
        "ledger": ledger.name,
        "shared": ledger.shared,
        "hosts": [{**to_json(h), "here": h.id == own} for h in hosts],
        "waiting": waiting,
        "refused": sorted(hub.jobs.refused & set(waiting)),
        "disagreements": [
            {**to_json(d), "slower": d.slower, "apart": [{**to_json(a), "ratio": a.ratio} for a in d.apart]}
            for d in odd
        ],
    }


def _told_apart(d: compare.Disagreement) -> compare.Disagreement:
    """Distinguish hosts of one name (virtual machines, containers) by the beginnings of their ids."""
    if d.names[0] != d.names[1]:
        return d
    return replace(d, names=(f"{d.names[0]} {d.hosts[0][:8]}", f"{d.names[1]} {d.hosts[1][:8]}"))


# --- certificates -----------------------------------------------------------------------------------------------------


async def certificate_list(hub: Hub, request: Request) -> Response:
    asked = query(request, {"limit": ""})
    limit = number(asked["limit"], "limit", 50, MOST_ROWS)
    return answer({"certificates": await asyncio.to_thread(_certificates, hub, limit)})


def certificate_file(hub: Hub) -> Any:
    return hub.home / "certificates.jsonl"


def _certificates(hub: Hub, limit: int) -> list[dict[str, Any]]:
    """Return the last certificates, newest first, without their samples."""
    path = certificate_file(hub)
    if not path.exists():
        return []
    found = [line for _, line in certificates.lines(path)][-limit:]
    return [summary_of(line) for line in reversed(found)]


def summary_of(line: bytes) -> dict[str, Any]:
    made = decode_certificate(line)
    return {
        "sequence": made.sequence,
        "timestamp": made.timestamp,
        "model": made.model,
        "device": made.device,
        "dtype": made.dtype,
        "batch": made.shape.batch,
        "context": made.shape.seq,
        "tokens_per_sec": made.tokens_per_sec,
        "latency_ms": to_json(made.latency_ms),
        "baseline_ms": made.baseline_ms,
        "speedup": made.speedup,
        "speedup_interval": to_json(claimed_interval(made)),
        "roofline": headline_roofline(made),
        "verification_ok": made.verification_ok,
        "contended": made.contended,
        "env_id": made.env_id,
        "checksum": made.checksum,
        "signed": bool(made.signer),
    }


async def certificate(hub: Hub, request: Request) -> Response:
    """Return the line as it is in the file: the checksum covers its bytes."""
    wanted = number(request.path_params["id"], "id", 0, 1 << 53)
    line = await asyncio.to_thread(certificate_line, hub, wanted)
    if line is None:
        raise Bad(404, f"no such certificate: {wanted}")
    return Response(line + b"\n", media_type="application/json")


def certificate_line(hub: Hub, wanted: int) -> bytes | None:
    path = certificate_file(hub)
    if not path.exists():
        return None
    return next((line for n, line in certificates.lines(path) if n == wanted), None)


async def verify_certificates(hub: Hub, request: Request) -> Response:
    """Verify the whole file: bytes, chain, arithmetic, physics, signatures. This measures nothing."""
    path = certificate_file(hub)
    if not path.exists():
        raise Bad(404, "no certificates exist yet")
    try:
        found = await asyncio.to_thread(verify, path)
    except AutoselError as error:
        return answer({"valid": False, "what": error.what, "why": error.why})
    held = {"certificates": found.certificates, "signed": found.signed, "head": found.head}
    if (open_ := not_checkable(path, found)) is not None:
        held |= {"what": open_.what, "why": open_.why}
    return answer({"valid": not found.unchecked, "not_checkable": to_json(found.unchecked), **held})


# --- the ledger, for other processes of ours --------------------------------------------------------------------------


async def about_ledger(hub: Hub, request: Request) -> Response:
    from autosel.ledger.schema import HEAD

    writable = not hub.writer.read_only
    return answer({"ledger": hub.ledger.name, "schema": HEAD, "writable": writable, "instance": hub.instance})


COMMAND = Limits(size=commands.MOST_BYTES, depth=32, text=commands.MOST_BYTES, number=1 << 64)


async def write_ledger(hub: Hub, request: Request) -> Response:
    """Make one change of the ledger, for the command line and tuners of this user; acknowledged when it is on disk."""
    if not is_local(request.scope):
        raise Bad(403, "the ledger is written over the Unix socket only")
    body = await read(request, COMMAND)
    try:
        command, leases = commands.decode(body)
    except ValueError as error:
        raise Bad(422, "this is not a command of the ledger", why=str(error)[:300]) from error
    return answer(await hub.write(lambda ledger: ledger.write(command, leases=leases)))


# --- the table --------------------------------------------------------------------------------------------------------

Handler = Callable[[Hub, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Describe an endpoint. `query`: the parameters, with their meaning."""

    method: str
    path: str
    handler: Handler
    summary: str
    query: Mapping[str, str] = field(default_factory=dict)


_OP = {"op": "only this op"}
_LIMIT = {"limit": f"how many, at most {MOST_ROWS}"}


def _get(path: str, handler: Handler, summary: str, **query: str) -> Endpoint:
    return Endpoint(method="GET", path=path, handler=handler, summary=summary, query=query)


def _post(path: str, handler: Handler, summary: str) -> Endpoint:
    return Endpoint(method="POST", path=path, handler=handler, summary=summary)


ENDPOINTS: tuple[Endpoint, ...] = (
    _get("/v1/health", health, "State and current work"),
    _get(
        "/v1/fingerprint",
        fingerprint,
        "A device's identity and measured rates",
        device="of this machine; cpu",
    ),
    _get("/v1/serving", serving, "Every decision that serves this device"),
    _get(
        "/v1/best/{op}",
        best,
        "The decisions that serve an op, or one of its workloads",
        workload="its key or bucket",
        device="of this machine; any",
    ),
    _get(
        "/v1/decisions",
        decisions,
        "Every decision ever made, newest first",
        **_OP,
        **_LIMIT,
        before="only decisions of a lower number",
    ),
    _get("/v1/decisions/{id}", decision, "One decision with its evidence"),
    _post("/v1/decisions/{id}/demote", change, "The baseline serves in its place"),
    _post("/v1/decisions/{id}/promote", change, "Promote another arm of it by hand"),
    _post("/v1/decisions/{id}/pin", change, "Pin it: it serves regardless of later races"),
    _post("/v1/decisions/{id}/unpin", change, "Remove the pin"),
    _get("/v1/candidates", candidates, "Proofs made here, and quarantines", **_OP),
    _get("/v1/races", races, "Races, newest first, with their verdicts", **_OP, **_LIMIT),
    _get("/v1/races/{id}", race, "The race behind a decision", samples="1: with every sample"),
    _get("/v1/jobs", job_list, "Running, waiting and finished jobs"),
    _get("/v1/jobs/{id}", job, "One job"),
    _post("/v1/jobs", ask, "Tune these workloads when the device is idle"),
    Endpoint(method="DELETE", path="/v1/jobs/{id}", handler=cancel, summary="Cancel a job"),
    _post("/v1/misses", misses, "Report workloads without a decision"),
    _get("/v1/uses", use_list, "Calls of clients by candidate"),
    _post("/v1/uses", report_uses, "Report the calls of one process since its last report"),
    _get("/v1/coverage", coverage_list, "The share of each process's time that decisions serve"),
    _post("/v1/coverage", report_coverage, "Report all calls of one process so far"),
    _get("/v1/faults", fault_list, "Faults seen in service, and quarantines"),
    _post("/v1/faults", report_fault, "Report a fault of a served kernel: demote it now"),
    _get("/v1/fleet", fleet, "Hosts of this ledger, decisions that wait for a proof, devices that disagree"),
    _get("/v1/certificates", certificate_list, "The last certificates, newest first", **_LIMIT),
    _get("/v1/certificates/verify", verify_certificates, "Check the file of certificates"),
    _get("/v1/certificates/{id}", certificate, "One certificate, byte for byte"),
    _get("/v1/events", events, "Stream of events"),
    _get("/v1", addresses, "This list"),
    _get("/v1/ledger", about_ledger, "Which ledger this daemon writes"),
    _post("/v1/ledger", write_ledger, "One change of the ledger (Unix socket only)"),
    _get("/metrics", metrics_text, "Figures for Prometheus"),
)
