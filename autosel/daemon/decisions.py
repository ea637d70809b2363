"""Handle the addresses of decisions, their races, and the candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from autosel.daemon.answers import answer
from autosel.daemon.bodies import MOST_ROWS, Bad, BodyLimits, number, query, read, typed
from autosel.daemon.hub import Hub
from autosel.errors import LedgerError
from autosel.ledger import rows
from autosel.ledger import schema as t
from autosel.ledger.commands import Demote, Pin, Promote, Unpin
from autosel.ledger.describe import decision_json
from autosel.ledger.store import Evidence, Ledger
from autosel.values import Decision, Race, to_json

BY_HAND = {kind.call: kind for kind in (Demote, Promote, Pin, Unpin)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Because:
    """Give a reason, which is stored with the decision. `candidate` has passed parity for it: to promote, or to pin;
    by default the decision's own is pinned."""

    reason: str
    candidate: str | None = None


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
    asked = query(request, {"samples": ""})
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


async def change(hub: Hub, request: Request) -> Response:
    """Demote, promote, pin or unpin."""
    verb = request.url.path.rsplit("/", 1)[1]
    wanted = number(request.path_params["id"], "id", 0, 1 << 53)
    asked: Because = typed(Because, await read(request, BodyLimits()))
    if not asked.reason.strip():
        raise Bad(422, "a reason is needed", why="it is kept with the decision")
    if verb == "promote" and not asked.candidate:
        raise Bad(422, "which candidate is to be promoted?", todo="name it in `candidate`")
    if verb in ("demote", "unpin") and asked.candidate:
        raise Bad(422, f"{verb} takes no candidate")
    await evidence_of(hub, request)  # 404 for an unknown decision
    command = BY_HAND[verb](decision_id=wanted, reason=asked.reason, candidate=asked.candidate)
    made: Decision = await hub.write(lambda ledger: ledger.write(command))
    await hub.reload()
    return answer({**decision_json(made), "recorded": made.state})
