"""Stage 1: measure the device again and compare it with the known values of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosel.values import Fingerprint, to_json
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table

UNIT_S = 300.0
AGREE = 0.15  # allowed difference from the file in fingerprints/: parts, clocks and coolers differ


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return ["take"]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Return identity, rates and notes; `ok` is false if a rate contradicts the datasheet."""
    from autosel import fingerprint

    fresh = fingerprint.take(scope.device, refresh=True)
    return {"ok": not _impossible(fresh), "fingerprint": to_json(fresh), "sheet": _beside_sheet(fresh)}


def _impossible(fp: Fingerprint) -> list[str]:
    return [note for note in fp.notes if " is outside " in note or " is below " in note]


def _beside_sheet(fp: Fingerprint) -> dict[str, list[float]]:
    """Return [measured, value in fingerprints/] for every rate that both have; empty for an unknown device."""
    from autosel.fingerprint import known

    sheet = next((known.load(n) for n in known.names() if known.load(n).name == fp.name), None)
    if sheet is None:
        return {}
    return {name: [fp.rates[name].value, rate.value] for name, rate in sheet.rates.items() if name in fp.rates}


def table(found: Mapping[str, Found]) -> Table:
    taken: dict[str, Any] = found.get("take", {}).get("fingerprint", {})
    sheet = found.get("take", {}).get("sheet", {})
    rows = []
    for name, rate in taken.get("rates", {}).items():
        known = sheet.get(name)
        beside = f"{known[0] / known[1]:.2f}" if known and known[1] else ""
        odd = " !" if known and known[1] and abs(known[0] / known[1] - 1) > AGREE else ""
        rows.append((name, f"{rate['value']:.4g}", rate["unit"], f"{rate['spread']:.1%}", beside + odd))
    notes, columns = tuple(taken.get("notes", ())), ("rate", "value", "unit", "spread", "x known")
    if not sheet:  # fingerprints/ has no file for this device
        rows, columns = [row[:-1] for row in rows], columns[:-1]
    return Table(columns=columns, rows=tuple(rows), remarks=notes)
