"""Handle the addresses in /v1 that concern the daemon itself. The table at the end lists all addresses."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from autosel.daemon import certificates, clients, decisions, fleet, metrics
from autosel.daemon import jobs as queue
from autosel.daemon.access import is_local
from autosel.daemon.answers import answer
from autosel.daemon.bodies import MOST_ROWS, Bad, BodyLimits, query, read
from autosel.daemon.events import MOST_READERS
from autosel.daemon.hub import Hub
from autosel.ledger import commands
from autosel.values import to_json
from autosel.version import __version__


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
            "commands": to_json(hub.commands),
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


async def about_ledger(hub: Hub, request: Request) -> Response:
    from autosel.ledger.schema import HEAD

    writable = not hub.writer.read_only
    return answer({"ledger": hub.ledger.name, "schema": HEAD, "writable": writable, "instance": hub.instance})


COMMAND = BodyLimits(size=commands.MOST_BYTES, depth=32, text=commands.MOST_BYTES, number=1 << 64)


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
_BEFORE = {"before": "only decisions of a lower number"}
_LIMIT = {"limit": f"how many, at most {MOST_ROWS}"}


def _get(path: str, handler: Handler, summary: str, **query: str) -> Endpoint:
    return Endpoint(method="GET", path=path, handler=handler, summary=summary, query=query)


def _post(path: str, handler: Handler, summary: str) -> Endpoint:
    return Endpoint(method="POST", path=path, handler=handler, summary=summary)


ENDPOINTS: tuple[Endpoint, ...] = (
    _get("/v1/health", health, "State and current work"),
    _get("/v1/fingerprint", fingerprint, "A device's identity and measured rates", device="of this machine; cpu"),
    _get("/v1/serving", decisions.serving, "Every decision that serves this device"),
    _get(
        "/v1/best/{op}",
        decisions.best,
        "The decisions that serve an op, or one of its workloads",
        workload="its key or bucket",
        device="of this machine; any",
    ),
    _get("/v1/decisions", decisions.decisions, "Every decision ever made, newest first", **_OP, **_LIMIT, **_BEFORE),
    _get("/v1/decisions/{id}", decisions.decision, "One decision with its evidence"),
    _post("/v1/decisions/{id}/demote", decisions.change, "The baseline serves in its place"),
    _post("/v1/decisions/{id}/promote", decisions.change, "Promote another arm of it by hand"),
    _post("/v1/decisions/{id}/pin", decisions.change, "Pin it: it serves regardless of later races"),
    _post("/v1/decisions/{id}/unpin", decisions.change, "Remove the pin"),
    _get("/v1/candidates", decisions.candidates, "Proofs made here, and quarantines", **_OP),
    _get("/v1/races", decisions.races, "Races, newest first, with their verdicts", **_OP, **_LIMIT),
    _get("/v1/races/{id}", decisions.race, "The race behind a decision", samples="1: with every sample"),
    _get("/v1/jobs", clients.job_list, "Running, waiting and finished jobs"),
    _get("/v1/jobs/{id}", clients.job, "One job"),
    _post("/v1/jobs", clients.ask, "Tune these workloads when the device is idle"),
    Endpoint(method="DELETE", path="/v1/jobs/{id}", handler=clients.cancel, summary="Cancel a job"),
    _post("/v1/misses", clients.misses, "Report workloads without a decision"),
    _get("/v1/uses", clients.use_list, "Calls of clients by candidate"),
    _post("/v1/uses", clients.report_uses, "Report the calls of one process since its last report"),
    _get("/v1/coverage", clients.coverage_list, "The share of each process's time that decisions serve"),
    _post("/v1/coverage", clients.report_coverage, "Report all calls of one process so far"),
    _get("/v1/faults", clients.fault_list, "Faults seen in service, and quarantines"),
    _post("/v1/faults", clients.report_fault, "Report a fault of a served kernel: demote it now"),
    _get("/v1/fleet", fleet.fleet, "Hosts of this ledger, decisions that wait for a proof, devices that disagree"),
    _get("/v1/certificates", certificates.certificate_list, "The last certificates, newest first", **_LIMIT),
    _get("/v1/certificates/verify", certificates.verify_certificates, "Check the file of certificates"),
    _get("/v1/certificates/{id}", certificates.certificate, "One certificate, byte for byte"),
    _get("/v1/events", events, "Stream of events"),
    _get("/v1", addresses, "This list"),
    _get("/v1/ledger", about_ledger, "Which ledger this daemon writes"),
    _post("/v1/ledger", write_ledger, "One change of the ledger (Unix socket only)"),
    _get("/metrics", metrics_text, "Figures for Prometheus"),
)
