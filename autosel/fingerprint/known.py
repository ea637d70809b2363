"""Load known devices from fingerprints/<name>.json, so that formulas work for devices that are not present.

A file separates the vendor's figures (`datasheet`: limits and peaks), estimates (`estimated`) and the measurements of
this project's probes (`measured`; null until one has run there). Every figure is {value, unit, source}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from autosel import files, resources
from autosel.errors import BadConfig, UnknownName
from autosel.values import Fingerprint, Rate, parse_json

SCHEMA = 1
MOST_BYTES = 1 << 20
SECTIONS = {"schema", "kind", "vendor", "name", "cc", "datasheet", "estimated", "measured"}


def names() -> tuple[str, ...]:
    """Return the known devices, by `load`'s names: `h200`, `rtx-5070-ti` ..."""
    return tuple(sorted(path.stem for path in resources.fingerprints().glob("*.json")))


@cache
def load(name: str) -> Fingerprint:
    """Return the fingerprint of a known device: rates are measured if available, else estimated; peaks are the
    datasheet's.

    Raises UnknownName with the nearest names, BadConfig naming the file and field.
    """
    if name not in names():
        raise UnknownName("device", name, names())
    return read(resources.fingerprints() / f"{name}.json")


def read(path: Path) -> Fingerprint:
    """Read a device file at any path. Raises BadConfig naming the file and field."""
    try:
        return _fingerprint(parse_json(files.read(path, MOST_BYTES), what=path.name), path)
    except OSError as error:
        raise BadConfig(f"{path} cannot be read", why=error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadConfig(f"{path} is not a device file", why=str(error)) from error


def _fingerprint(data: Mapping[str, Any], path: Path) -> Fingerprint:
    _object(data, "the file", SECTIONS)
    if data["schema"] != SCHEMA or data["kind"] != "cuda":
        raise ValueError(f"schema {data['schema']!r} of kind {data['kind']!r}; this version reads {SCHEMA} of 'cuda'")
    texts = {key: _text(data[key], key) for key in ("vendor", "name", "cc")}
    datasheet = _object(data["datasheet"], "datasheet", {"limits", "peaks"})
    limits = _figures(datasheet["limits"], "datasheet.limits")
    identity = {**texts, **{key: _plain(rate.value) for key, rate in limits.items()}}
    rates = _figures(datasheet["peaks"], "datasheet.peaks") | _figures(data["estimated"], "estimated")
    measured = _object(data["measured"], "measured", set(data["estimated"]))
    found = _figures({key: figure for key, figure in measured.items() if figure is not None}, "measured")
    return Fingerprint(
        kind="cuda",
        name=texts["name"],
        identity=identity,
        environment={},
        rates=rates | found,
        notes=() if found else ("no figure here was measured by autosel: datasheet and estimates",),
        source=path.name,
    )


def _figures(data: Any, where: str) -> dict[str, Rate]:
    return {key: _figure(figure, f"{where}.{key}") for key, figure in _object(data, where).items()}


def _figure(data: Any, where: str) -> Rate:
    """Return {value, unit, source} and, for a measured figure, the spread over its windows."""
    fields = {"value", "unit", "source"}
    _object(data, where, fields | (set(data) & {"spread"} if isinstance(data, dict) else set()))
    value, spread = data["value"], data.get("spread", 0.0)
    for number in (value, spread):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"{where}: {number!r} is not a number")
    if value <= 0 or spread < 0:
        raise ValueError(f"{where}: {value!r} with spread {spread!r} is not a figure of a device")
    unit, source = _text(data["unit"], f"{where}.unit"), _text(data["source"], f"{where}.source")
    return Rate(value=float(value), unit=unit, spread=float(spread), source=source)


def _object(data: Any, where: str, keys: set[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    if keys is not None and set(data) != keys:
        odd = ", ".join(sorted(set(data) ^ keys))
        raise ValueError(f"{where}: missing or unknown: {odd}")
    return data


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str) or not data.strip():
        raise ValueError(f"{where}: expected words, got {data!r}")
    return data


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value
