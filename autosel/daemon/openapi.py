"""Describe the interface as an OpenAPI 3.1 document, made from the table of endpoints and the types of their bodies."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from autosel.daemon.bodies import MOST_TEXT
from autosel.version import __version__

if TYPE_CHECKING:
    from autosel.daemon.api import Endpoint

_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_REFUSALS = {
    "400": "not JSON",
    "401": "it needs the token",
    "403": "from a forbidden origin",
    "404": "not there",
    "405": "not with this method",
    "408": "the body did not come in time",
    "409": "conflict with the present state",
    "413": "too large",
    "415": "not application/json",
    "422": "not the expected fields",
    "503": "too much at once, or the disk cannot be written",
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Problem": _problem()}
    paths: dict[str, Any] = {}
    for e in endpoints:
        paths.setdefault(e.path, {})[e.method.lower()] = _operation(e, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "autosel",
            "version": __version__,
            "description": "The decisions that serve each op on this device, their evidence, and the tuning queue. "
            "Reading needs no token; over TCP, changes need it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(e: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = (
        {"schema": {"type": "object"}} if e.media == "application/json" else {"schema": {"type": "string"}}
    )
    if e.path == "/v1/best/{op}":
        schema = {"schema": {"type": ["object", "array"]}}
    elif e.path == "/v1/ledger" and e.method == "POST":
        schema = {"schema": {}}
    made: dict[str, Any] = {
        "summary": e.summary,
        "operationId": _name(e),
        "parameters": [*_path_parameters(e), *_query_parameters(e)],
        "responses": {
            str(e.status): {"description": "done", "content": {e.media: schema}},
            **{
                status: {"description": why, "content": {"application/json": {"schema": _PROBLEM}}}
                for status, why in _REFUSALS.items()
            },
        },
    }
    if e.method != "GET":
        made["security"] = [{"token": []}, {}]  # over the Unix socket the kernel identifies the caller
    if e.body is not None:
        content = {"application/json": {"schema": schema_of(e.body, schemas)}}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _name(e: Endpoint) -> str:
    return "_".join([e.method.lower(), *re.findall(r"[a-z]+", e.path.replace("/v1/", "/"))])


def _path_parameters(e: Endpoint) -> list[dict[str, Any]]:
    found = []
    for name in re.findall(r"\{(\w+)\}", e.path):
        schema = {"type": "integer", "minimum": 1} if name == "id" else {"type": "string", "maxLength": MOST_TEXT}
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    return found


def _query_parameters(e: Endpoint) -> list[dict[str, Any]]:
    numbers = {"limit", "before"}
    return [
        {
            "name": name,
            "in": "query",
            "description": what,
            "schema": {"type": "integer", "minimum": 1} if name in numbers else {"type": "string"},
        }
        for name, what in e.query.items()
    ]


def schema_of(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of the values that `values.from_json` reads as `kind`; dataclasses go into `schemas`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(arm, schemas) for arm in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": schema_of(args[0], schemas)}
        items = [schema_of(a, schemas) for a in args]
        return {"type": "array", "prefixItems": items, "minItems": len(args), "maxItems": len(args)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(args[1], schemas)}
    if dataclasses.is_dataclass(kind):
        return _object(kind, schemas)
    return dict(_PLAIN[kind])


_PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    dict: {"type": "object"},
    type(None): {"type": "null"},
}


def _object(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in schemas:
        schemas[name] = {}  # a type may contain itself
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        required = [
            f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        schemas[name] = {
            "type": "object",
            "description": (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " "),
            "properties": {f.name: schema_of(hints[f.name], schemas) for f in fields},
            "required": required,
            "additionalProperties": False,
        }
    return {"$ref": f"#/components/schemas/{name}"}


def _problem() -> dict[str, Any]:
    words = {name: {"type": "string"} for name in ("kind", "what", "why", "todo")}
    inner = {"type": "object", "properties": words, "required": list(words)}
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
