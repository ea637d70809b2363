"""Decide who may send which request, before any handler runs.

Over the Unix socket the kernel identifies the peer: this user or root. Over TCP anyone on this machine, and any web
page that this user has open, can connect. So the Host must be exactly the daemon's (a rebound name differs), an Origin
must be listed, and changes need the token. Without the token everything can be read.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autosel.daemon.answers import problem

log = logging.getLogger(__name__)

Scope = Mapping[str, Any]
READING = ("GET", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Hold `hosts` and `origins` of the TCP listener; empty without one."""

    token: str = ""
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    @classmethod
    def over_tcp(cls, port: int, token: str, origins: Iterable[str] = ()) -> Access:
        hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))
        own = {f"http://{host}" for host in hosts}
        return cls(token=token, hosts=hosts, origins=frozenset({*own, *origins}))

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return HTTP's status and the reason for a refusal, or None to continue."""
        if is_local(scope):
            page = any(name == b"origin" for name, _ in scope["headers"])
            return (403, "a web page has no business at the Unix socket") if page else None
        headers = heads(scope)
        origin = headers.get("origin")
        if headers.get("host", "").lower() not in self.hosts:
            return 403, f"the Host {headers.get('host', '')!r:.80} is not this daemon's"
        if origin is not None and origin.lower() not in self.origins:
            return 403, f"the Origin {origin!r:.80} is not listed"
        if scope["method"] not in READING and not self._trusts(headers):
            if "authorization" in headers:
                return 401, "the token is not this daemon's: each start writes another one (AUTOSEL_HOME/run/token)"
            return 401, "this changes something: it needs the token (Authorization: Bearer ...)"
        return None

    def _trusts(self, headers: Mapping[str, str]) -> bool:
        """Return True if the caller has the token."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return kind.lower() == "bearer" and bool(self.token) and same


def is_local(scope: Scope) -> bool:
    """Return True if the request came over the Unix socket, from a user that the kernel identified."""
    client = scope.get("client") or ("", 0)
    return str(client[0]).startswith("uid:")


def heads(scope: Scope) -> dict[str, str]:
    """Return headers by name. Duplicates are joined, so that they match nothing."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        found[name] = f"{found[name]}, {text}" if name in found else text
    return found


class Gate:
    """Let through requests that `Access` allows (ASGI), and add security headers for browsers to every answer. No
    browser reaches the Unix socket."""

    def __init__(self, app: Any, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self.access.refusal(scope)
        if refused is not None:
            status, why = refused
            log.warning("refused %s %s of %s: %s", scope["method"], scope["path"][:80], scope.get("client"), why)
            answer = problem(status, "refused", why=why)
            await answer(scope, receive, _guarded(send))
            return
        await self.app(scope, receive, send if is_local(scope) else _guarded(send))


# Scripts, styles and data only from here; the page in no frame; no form leads elsewhere.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
    b"connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


def _guarded(send: Any) -> Any:
    async def with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await send(message)

    return with_headers
