"""Handle the addresses of certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from autosel.certify import store as certificates
from autosel.certify.certificate import decode as decode_certificate
from autosel.certify.derive import claimed_interval, headline_roofline
from autosel.certify.verify import not_checkable, verify
from autosel.daemon.answers import answer
from autosel.daemon.bodies import MOST_ROWS, Bad, number, query
from autosel.daemon.hub import Hub
from autosel.errors import AutoselError
from autosel.ledger.rows import named
from autosel.values import to_json


async def certificate_list(hub: Hub, request: Request) -> Response:
    asked = query(request, {"limit": ""})
    limit = number(asked["limit"], "limit", 50, MOST_ROWS)
    return answer({"certificates": await asyncio.to_thread(_certificates, hub, limit)})


def certificate_file(hub: Hub) -> Path:
    return hub.home / "certificates.jsonl"


def stored_lines(hub: Hub) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each certificate; nothing without a file."""
    path = certificate_file(hub)
    if path.exists():
        yield from certificates.lines(path)


def _certificates(hub: Hub, limit: int) -> list[dict[str, Any]]:
    """Return the last certificates, newest first, without their samples."""
    found = [line for _, line in stored_lines(hub)][-limit:]
    return [summary_of(line) for line in reversed(found)]


def summary_of(line: bytes) -> dict[str, Any]:
    made = decode_certificate(line)
    return {
        **named(made, ("sequence", "timestamp", "model", "device", "dtype")),
        "batch": made.shape.batch,
        "context": made.shape.seq,
        "tokens_per_sec": made.tokens_per_sec,
        "latency_ms": to_json(made.latency_ms),
        **named(made, ("baseline_ms", "speedup")),
        "speedup_interval": to_json(claimed_interval(made)),
        "roofline": headline_roofline(made),
        **named(made, ("verification_ok", "contended", "env_id", "checksum")),
        "signed": bool(made.signer),
    }


async def certificate(hub: Hub, request: Request) -> Response:
    """Return the line as it is in the file: the checksum covers its bytes."""
    wanted = number(request.path_params["id"], "id", 0, 1 << 53)
    line = await asyncio.to_thread(lambda: next((line for n, line in stored_lines(hub) if n == wanted), None))
    if line is None:
        raise Bad(404, f"no such certificate: {wanted}")
    return Response(line + b"\n", media_type="application/json")


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
