"""List the stages by name, in order; each is a module of this folder.

A stage has UNIT_S, the deadline of one unit; `units(scope, fp)`, their names; `run(unit, scope, fp)`, a unit's result
as plain JSON with at least `ok`; and `table(found)`, the stage's results for people. It may have `expect(units, scope,
fp)`, which is called once before the first unit with all units to come, so that it can start them ahead. Importing a
stage loads no torch, since the parent process imports it for its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope

Found = dict[str, Any]  # a unit's result


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A stage's results for people: columns, rows of text, and remarks."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()


class Stage(Protocol):
    UNIT_S: float

    def units(self, scope: Scope, fp: Fingerprint) -> list[str]: ...

    def run(self, unit: str, scope: Scope, fp: Fingerprint) -> Found: ...

    def table(self, found: Mapping[str, Found]) -> Table: ...


STAGES = {
    "fingerprint": "benchmarks.gpu.fingerprint",
    "parity": "benchmarks.gpu.parity",
    "sanitizer": "benchmarks.gpu.sanitizer",
    "graph": "benchmarks.gpu.graph",
    "containment": "benchmarks.gpu.containment",
    "bench": "benchmarks.gpu.bench",
    "regret": "benchmarks.gpu.regret",
    "tune": "benchmarks.gpu.tune",
    "decode": "benchmarks.gpu.decode",
    "sweep": "benchmarks.gpu.sweeps",
    "engines": "benchmarks.gpu.engines",
}
NAMES = tuple(STAGES)


def stage(name: str) -> Stage:
    found: Any = import_module(STAGES[name])
    return found
