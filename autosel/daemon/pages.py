"""Render the dashboard on the server. It is readable without JavaScript, which only updates changes and draws charts.

Reading needs no token. A GET changes nothing; changes go through /v1.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from autosel import settings
from autosel.certify.derive import claimed_interval, headline_roofline
from autosel.daemon import charts, examination, shown
from autosel.daemon.api import Handler
from autosel.daemon.bodies import Bad, number, query
from autosel.daemon.decisions import evidence_of
from autosel.daemon.fleet import fleet_json
from autosel.daemon.hub import Hub
from autosel.daemon.jobs import OPEN
from autosel.errors import LedgerError
from autosel.fingerprint.describe import describe
from autosel.ledger import describe as words
from autosel.values import Fingerprint, from_json
from autosel.version import __version__

NAV = (
    ("now", "/", "Now"),
    ("race", "/race", "Race"),
    ("op", "/op", "Op"),
    ("decisions", "/decisions", "Decisions"),
    ("certificates", "/certificates", "Certificates"),
    ("fleet", "/fleet", "Fleet"),
    ("health", "/health", "Health"),
)


def _ago(stamp: str) -> Markup:
    """Return `3 min ago`, with the exact time as a tooltip."""
    then = datetime.fromisoformat(stamp)
    seconds = max(0.0, (datetime.now(UTC) - then).total_seconds())
    text = "just now"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            text = f"{int(seconds // size)} {unit} ago"
            break
    exact = then.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(stamp, exact, text)


def _duration(seconds: float) -> str:
    """Return `40 s`, `3 min`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("autosel.daemon"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "ago": _ago,
        "duration": _duration,
        "device": shown.device,
        "us": words.microseconds,
        "ratio": words.ratio,
        "bytes": words.bytes_text,
        "bandwidth": words.bandwidth,
        "shape": words.shape,
        "spread": lambda timing: words.spread(timing).strip(),
        "against": words.against_baseline,
        "contended": words.contended,
        "measured": words.measured,
        "headline": headline_roofline,
        "interval": claimed_interval,
        "percent": lambda share: f"{share:.0%}".replace("%", " %"),
        "data": lambda value: Markup(json.dumps(value).replace("<", "\\u003c").replace("&", "\\u0026")),  # noqa: S704
    }
    made.globals |= {
        "nav": NAV,
        "version": __version__,
        "spelling": settings.spelling(),
        "release": words.release_command,
    }
    return made


async def _page(hub: Hub, name: str, title: str, status: int = 200, **values: Any) -> Response:
    held = await hub.read(lambda ledger: shown.quarantines(ledger, hub.view))
    warnings = shown.warnings(hub, held)
    text = _environment().get_template(f"{name}.html").render(
        here=name, title=title, hub=hub, view=hub.view, warnings=warnings, quarantines=held, **values
    )  # fmt: skip
    return Response(text, status, media_type="text/html", headers={"Cache-Control": "no-store"})


# --- the pages --------------------------------------------------------------------------------------------------------


async def now(hub: Hub, request: Request) -> Response:
    query(request, {})
    changes = await hub.read(lambda ledger: ledger.history(limit=6))
    jobs = [j for j in hub.jobs.all() if j.state in OPEN]
    return await _page(
        hub, "now", "Now", load_average=os.getloadavg()[0], ops=shown.by_op(hub.view), all=shown.overall(hub.view),
        changes=changes, jobs=jobs[:8], waiting=len(jobs), live=_live(hub),
    )  # fmt: skip


async def race(hub: Hub, request: Request) -> Response:
    query(request, {})
    jobs = hub.jobs.all()
    waiting = [j for j in jobs if j.state in OPEN]
    raced = await hub.read(shown.last_races)
    return await _page(
        hub, "race", "Race", live=_live(hub), waiting=waiting, ended=jobs[len(waiting) :], raced=raced,
        forest=[charts.forest(d) for d in raced[:12]],
    )  # fmt: skip


def _live(hub: Hub) -> dict[str, Any] | None:
    return hub.jobs.live.document() if hub.jobs.live else None


async def ops(hub: Hub, request: Request) -> Response:
    query(request, {})
    return await _page(hub, "ops", "Ops", ops=shown.by_op(hub.view))


async def op(hub: Hub, request: Request) -> Response:
    asked = query(request, {"family": ""})
    name = request.path_params["op"]
    rows = hub.view.of_op(name)
    if not rows:
        raise Bad(
            404, f"nothing is decided for {name[:60]!r} here", todo=f"{settings.spelling()} tune --op {name[:60]}"
        )
    families = shown.families(rows, hub.view.device) if hub.view.others else shown.families(rows)
    chosen = next((f for f in families if f.id == asked["family"]), families[0])
    sources = await asyncio.to_thread(shown.sources, chosen.decisions)
    chart = charts.times(chosen.decisions, hub.moved, chosen.axis, hub.view.stale)
    return await _page(
        hub, "op", name, op=name, families=families, chosen=chosen, chart=chart, sources=sources,
        candidates=charts.candidates(chosen.decisions),
    )  # fmt: skip


async def decisions(hub: Hub, request: Request) -> Response:
    asked = query(request, {"op": "", "before": ""})
    before = number(asked["before"], "before", 0, 1 << 53)
    found = await hub.read(lambda ledger: ledger.history(asked["op"] or None, limit=50, before=before or None))
    serves = {d.id for d in hub.view.here}
    return await _page(
        hub, "decisions", "Decisions", decisions=found, serves=serves, op=asked["op"], more=len(found) == 50
    )


async def decision(hub: Hub, request: Request) -> Response:
    query(request, {})
    e = await evidence_of(hub, request)
    return await _page(
        hub, "decision", f"Decision {e.decision.id}", e=e, d=e.decision, v=e.decision.verdict,
        stale=hub.view.stale.get(str(e.decision.id), ""), sessions=shown.sessions(e.race),
        forest=[charts.forest(e.decision)], moved=hub.moved.get(str(e.decision.id)),
        passed=shown.choosable(e),
    )  # fmt: skip


async def certificates(hub: Hub, request: Request) -> Response:
    query(request, {})
    found, trouble = await asyncio.to_thread(shown.certificates, hub)
    chart = charts.tokens(found)
    return await _page(hub, "certificates", "Certificates", found=found, trouble=trouble, chart=chart)


async def compare(hub: Hub, request: Request) -> Response:
    why = "the command also compares the conditions of both runs"
    raise Bad(410, "two runs are compared by a command", why=why, todo=f"{settings.spelling()} verify --compare A B")


async def fleet(hub: Hub, request: Request) -> Response:
    query(request, {})
    found = await hub.read(lambda ledger: fleet_json(ledger, hub))
    return await _page(hub, "fleet", "Fleet", host_name=platform.node(), fleet=found)


async def health(hub: Hub, request: Request) -> Response:
    asked = query(request, {"again": ""})
    findings = examination.findings(hub.examination, again=asked["again"] == "1")
    stores = await asyncio.to_thread(shown.stores, hub)
    fp = from_json(Fingerprint, hub.facts.fingerprint) if hub.facts.fingerprint else None
    return await _page(
        hub, "health", "Health", findings=findings, stores=stores, facts=describe(fp) if fp else [],
        refresh=findings is None,
    )  # fmt: skip


async def not_there(hub: Hub, error: Bad | LedgerError) -> Response:
    """Render a refusal as a page."""
    status = getattr(error, "status", 409)
    return await _page(hub, "trouble", "Not there", status, error=error)


# --- what pages load ----------------------------------------------------------------------------------------------


STATIC = {"style.css": "text/css", "live.js": "text/javascript", "charts.js": "text/javascript"}
PLOTLY = "plotly.min.js"
if find_spec("plotly") is None:  # imported at the start, because it takes too long when a page needs its script
    raise ModuleNotFoundError("No module named 'plotly'", name="plotly")


async def static(hub: Hub, request: Request) -> Response:
    name = request.path_params["name"]
    if name != PLOTLY and name not in STATIC:
        raise Bad(404, "no such file")
    content, kind = _static(name)
    headers = {"Cache-Control": "max-age=3600", "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        content, headers = gzip.decompress(content), {"Cache-Control": "max-age=3600"}
    return Response(content, media_type=kind, headers=headers)


@cache
def _static(name: str) -> tuple[bytes, str]:
    """Compress once: plotly's script is 4.8 MB, compressed a quarter of that."""
    if name == PLOTLY:
        return gzip.compress(files("plotly").joinpath("package_data", PLOTLY).read_bytes(), 6), "text/javascript"
    return gzip.compress(files("autosel.daemon").joinpath("static", name).read_bytes()), STATIC[name]


PAGES: Mapping[str, Handler] = {
    "/": now,
    "/race": race,
    "/op": ops,
    "/op/{op}": op,
    "/decisions": decisions,
    "/decisions/{id}": decision,
    "/certificates": certificates,
    "/compare": compare,
    "/fleet": fleet,
    "/health": health,
    "/static/{name}": static,
}
