"""Build the daemon's answers: JSON, and for a refusal the problem, its cause and the fix."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from autosel.daemon.bodies import Bad
from autosel.daemon.jobs import Full
from autosel.daemon.writer import Busy
from autosel.errors import AutoselError, BadArguments, BadConfig, LedgerError, ParityError, UnknownName, UsageError
from autosel.ledger.engine import lost
from autosel.ledger.faults import plain
from autosel.values import to_json


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(value), status, media_type="application/json", headers=headers)


def encoded(value: Any) -> bytes:
    return json.dumps(plain(to_json(value)), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def problem(status: int, what: str, *, why: str = "", todo: str = "", kind: str = "Refused") -> Response:
    headers = {"Retry-After": "1"} if status == 503 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return answer({"error": {"kind": kind, "what": what, "why": why, "todo": todo}}, status, headers)


def refusal(error: AutoselError, *, read_only: bool) -> Response:
    """Turn a handler's exception into an answer."""
    if isinstance(error, Bad):
        return problem(error.status, error.what, why=error.why, todo=error.todo)
    if isinstance(error, Busy | Full):
        return problem(503, error.what, why=error.why, todo=error.todo)
    if isinstance(error, LedgerError) and (lost(error) or read_only):
        return problem(503, error.what, why=error.why, todo=error.todo, kind="LedgerError")
    # a fault of the request, or a conflict with the present state
    status = 404 if isinstance(error, UnknownName) else 400 if isinstance(error, UsageError) else 409
    kind = next((c.__name__ for c in type(error).__mro__ if c in _TRAVELLING), "Refused")
    return problem(status, error.what, why=error.why, todo=error.todo, kind=kind)


def our_bug(error: Exception) -> Response:
    return problem(500, "this is a bug in autosel", why=f"{type(error).__name__}: {error}"[:300], todo="see the log")


_TRAVELLING = (LedgerError, ParityError, BadConfig, BadArguments, UsageError)  # `client` raises them again
