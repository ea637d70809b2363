"""Limit requests in size, depth and types. Anything else is an error of the caller, with a message."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from autosel.errors import AutoselError
from autosel.values import Workload, from_json, parse_json

MOST_BYTES = 64 << 10
MOST_DEPTH = 16
MOST_TEXT = 256
MOST_DIMS, MOST_SIZE = 8, 1 << 40
READ_S = 10.0
MOST_ROWS = 500  # of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Set the limits of an address. `text`: the longest string, in characters; `number`: the largest absolute whole
    number."""

    size: int = MOST_BYTES
    depth: int = MOST_DEPTH
    text: int = MOST_TEXT
    number: int = 1 << 53


class Bad(AutoselError):
    """Raised for an invalid request. `status` is HTTP's."""

    def __init__(self, status: int, what: str, *, why: str = "", todo: str = "") -> None:
        super().__init__(what, why=why, todo=todo)
        self.status = status


async def read(request: Request, limits: BodyLimits) -> Any:
    """Return the body as JSON. Raises Bad."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Bad(415, "the body must be JSON", why=f"its Content-Type is {kind!r:.80}", todo="send application/json")
    return parsed(await _bytes(request, limits.size), limits)


def parsed(data: bytes, limits: BodyLimits) -> Any:
    """Parse a body's bytes. Raises Bad."""
    try:
        found = parse_json(data.decode(), what="the body", depth=limits.depth)
    except ValueError as error:  # not UTF-8, not JSON, NaN, a key twice, too deep, a number of 5000 digits
        raise Bad(400, "the body is not JSON", why=f"{error}"[:200]) from error
    _refuse_long(found, limits)
    return found


async def _bytes(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise Bad(413, f"the body is larger than {most} bytes")
    found = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise Bad(413, f"the body is larger than {most} bytes")
    except TimeoutError as error:
        raise Bad(408, f"the body did not come within {READ_S:.0f} s") from error
    except ClientDisconnect as error:
        raise Bad(400, "the body broke off") from error
    return bytes(found)


def _refuse_long(data: Any, limits: BodyLimits) -> None:
    if isinstance(data, str) and (len(data) > limits.text or "\0" in data):
        raise Bad(422, f"a text of {len(data)} characters", why=f"at most {limits.text}, and no NUL")
    if isinstance(data, int) and abs(data) > limits.number:
        raise Bad(422, f"a whole number of {data.bit_length()} bits", why=f"at most {limits.number}")
    for item in (*data, *data.values()) if isinstance(data, dict) else data if isinstance(data, list) else ():
        _refuse_long(item, limits)


def typed(kind: Any, data: Any) -> Any:
    """Return the value as type `kind`. Raises Bad, naming the invalid field."""
    try:
        made = from_json(kind, data)
    except ValueError as error:
        raise Bad(422, "the body does not have the expected fields", why=str(error)[:300]) from error
    return made


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


def refuse_odd(w: Workload) -> None:
    """Raise Bad for a workload that no op matches."""
    odd = ""
    names = [name for name, _ in w.dims]
    if not _NAME.fullmatch(w.op):
        odd = f"op {w.op!r:.40}"
    elif not 1 <= len(w.dims) <= MOST_DIMS or len(set(names)) != len(names):
        odd = f"{len(w.dims)} dimensions, {len(set(names))} names"
    elif not all(_NAME.fullmatch(name) and 1 <= size <= MOST_SIZE for name, size in w.dims):
        odd = "a dimension outside 1..2^40, or without a name"
    elif len(w.traits) > 16 or not all(_NAME.fullmatch(name) for name, _ in w.traits):
        odd = "traits"
    elif not all(_WORD.fullmatch(str(value)) for _, value in w.traits):
        odd = "the value of a trait"
    if odd:
        raise Bad(422, "no op has such a workload", why=f"{odd} in {w.key[:120]}")


def number(text: str, name: str, default: int, most: int) -> int:
    """Return a whole number of the query, from 1. Raises Bad."""
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 12 or not 1 <= int(text) <= most:
        raise Bad(422, f"{name}={text[:40]}", why=f"a whole number from 1 to {most} is expected")
    return int(text)


def query(request: Request, known: Mapping[str, str]) -> dict[str, str]:
    """Return the query's parameters, with defaults. Raises Bad for an unknown, repeated or long one."""
    found = dict(known)
    seen = set()
    for name, value in request.query_params.multi_items():
        if name not in known or name in seen:
            todo = f"known: {', '.join(known)}" if known else "it takes none"
            raise Bad(422, f"the parameter {name[:40]!r} is {'repeated' if name in seen else 'unknown'}", todo=todo)
        if len(value) > MOST_TEXT or not value.isprintable():
            raise Bad(422, f"the parameter {name} is too long or not text")
        seen.add(name)
        found[name] = value
    return found
