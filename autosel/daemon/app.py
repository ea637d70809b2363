"""Assemble the daemon as an ASGI application: the gate, then frequent lookups on a short path, then all other
routes."""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from autosel.daemon import api, pages
from autosel.daemon.access import Access, Gate
from autosel.daemon.answers import our_bug, problem, refusal
from autosel.daemon.bodies import MOST_TEXT, Bad
from autosel.daemon.hub import Hub
from autosel.errors import AutoselError

log = logging.getLogger(__name__)

LOOKUP = "/v1/best/"
_JSON = [(b"content-type", b"application/json")]


def build(hub: Hub, access: Access) -> Any:
    routes = [_route(hub, e.path, e.handler, e.method) for e in api.ENDPOINTS]
    routes += [_route(hub, path, handler, "GET") for path, handler in pages.PAGES.items()]
    app = Starlette(routes=routes, exception_handlers={Exception: _our_bug, HTTPException: _http})
    return Gate(Lookups(app, hub), access)


class Lookups:
    """Answer the most frequent request, GET /v1/best/OP[?workload=KEY], without a framework."""

    def __init__(self, app: Any, hub: Hub) -> None:
        self.app, self.hub = app, hub

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith(LOOKUP):
            await self.app(scope, receive, send)
            return
        text = scope["query_string"]
        op, workload = scope["path"][len(LOOKUP) :], ""
        if text:
            if not text.startswith(b"workload=") or b"&" in text or len(text) > 3 * MOST_TEXT:
                await self.app(scope, receive, send)  # names the error
                return
            workload = unquote(text[9:].decode("latin-1").replace("+", " "))
        if len(workload) > MOST_TEXT or len(op) > MOST_TEXT or not workload.isprintable() or "/" in op:
            await self.app(scope, receive, send)
            return
        if self.hub.behind:
            await self.hub.caught_up()
        body = self.hub.view.lookup(op, workload)
        self.hub.metrics.lookups.inc()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, length]})
        await send({"type": "http.response.body", "body": body})


def _route(hub: Hub, path: str, handler: api.Handler, method: str) -> Route:
    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        made = await _answered(hub, handler, request)
        hub.metrics.requests.labels(path, str(made.status_code)).inc()
        if path != "/v1/events":
            hub.metrics.seconds.observe(time.perf_counter() - started)
        return made

    return Route(path, endpoint, methods=[method])


async def _answered(hub: Hub, handler: api.Handler, request: Request) -> Response:
    """Return the handler's answer, or its exception as an answer."""
    if hub.behind and request.method == "GET":
        await hub.caught_up()
    try:
        return await handler(hub, request)
    except AutoselError as error:
        if isinstance(error, Bad) and handler in pages.PAGES.values():
            return await pages.not_there(hub, error)
        return refusal(error, read_only=hub.writer.read_only)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    todo = "GET /v1 lists all addresses"
    what = {404: "no such address", 405: f"not with {request.method}"}.get(error.status_code, error.detail)
    made = problem(error.status_code, what, todo=todo)
    made.headers.update(error.headers or {})
    return made


async def _our_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return our_bug(error)
