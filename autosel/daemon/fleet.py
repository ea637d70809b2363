"""Describe who shares the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from autosel.daemon.answers import answer
from autosel.daemon.bodies import query
from autosel.daemon.hub import Hub
from autosel.ledger import compare
from autosel.ledger.host import here as this_host
from autosel.ledger.store import Ledger
from autosel.values import to_json


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
        "hosts": [{**h, "here": h["id"] == own} for h in hosts],
        "waiting": waiting,
        "refused": sorted(hub.jobs.refused & set(waiting)),
        "disagreements": [
            {**to_json(d), "slower": d.slower, "apart": [{**to_json(a), "ratio": a.ratio} for a in d.apart]}
            for d in odd
        ],
    }


def _told_apart(d: compare.Discrepancy) -> compare.Discrepancy:
    """Distinguish hosts of one name (virtual machines, containers) by the beginnings of their ids."""
    if d.names[0] != d.names[1]:
        return d
    return replace(d, names=(f"{d.names[0]} {d.hosts[0][:8]}", f"{d.names[1]} {d.hosts[1][:8]}"))
