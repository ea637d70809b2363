"""Commands that take in decisions of another ledger: import them, and adopt those that this host has proven."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import Connection

from autosel.ledger import containment, rows, serving, snapshot
from autosel.ledger.decide import decide, recorded
from autosel.ledger.host import Host
from autosel.ledger.transaction import Command, Transaction
from autosel.values import Decision, NativeRecipe, Parity, PythonRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Report an import by the numbers of its decisions here: those that serve now; those that wait for this host's own
    proof; and those only stored, each with the reason."""

    served: tuple[int, ...]
    waiting: tuple[int, ...]
    kept: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import(Command[Imported]):
    """Import an export, of another host if `origin` names it: all rows or none. Raises BadConfig unless it is a
    complete export. `also`: this machine's other devices.

    Rows of other devices do not serve here, nor do rows that would import a module outside autosel, because data must
    not introduce code. A local pin stays. An arm that has not passed parity on this host waits until it has (`Adopt`),
    and the previous decision keeps serving.
    """

    call: ClassVar[str] = "import"
    document: Mapping[str, Any]
    hw_id: str
    origin: Host | None = None
    also: tuple[str, ...] = ()

    def run(self, tx: Transaction) -> Imported:
        found = snapshot.validate(self.document, "the import")
        decisions = [row.decision for row in found.rows]
        owner = rows.put_host(tx.c, self.origin) if self.origin else None
        served: list[int] = []
        waiting: list[int] = []
        kept: list[tuple[int, str]] = []
        for d in decisions:
            why = _refusal(tx.c, d, d.hw_id if d.hw_id in self.also else self.hw_id)
            made = _take(tx.c, owner, d, f"import-{found.digest}-{d.id}", serves=not why)
            if why:
                kept.append((made, why))
            else:
                (served if rows.one(tx.c, made, host=tx.prover).usable else waiting).append(made)
        return Imported(served=tuple(served), waiting=tuple(waiting), kept=tuple(kept))


def _take(c: Connection, owner: int | None, d: Decision, key: str, *, serves: bool) -> int:
    said = replace(d, reason=f"imported (decision {d.id} of another ledger): {d.reason}")
    return (recorded(c, key) or decide(c, said, host=owner, key=key, serves=serves)).id


def _refusal(c: Connection, d: Decision, hw_id: str) -> str:
    """Return why an imported decision may not serve here, or ""."""
    if d.hw_id != hw_id:
        return f"measured on another device ({d.hw_id[:12]}, this is {hw_id[:12]})"
    for recipe in (d.arm.recipe, d.baseline.recipe):
        if isinstance(recipe, PythonRecipe) and (recipe.path or not recipe.target.startswith("autosel.")):
            return f"it would import {recipe.target}: race that candidate here instead"
        if isinstance(recipe, NativeRecipe) and (recipe.source.startswith("/") or ".." in Path(recipe.source).parts):
            return f"its source {recipe.source} is not one of autosel's"
    if any(arm.build and not re.fullmatch("[0-9a-f]{64}", arm.build) for arm in (d.arm, d.baseline)):
        return "its build is not named by a digest"  # but possibly by a path
    if any(q.digest in (d.arm.digest, d.arm.build) for q in containment.active(c, d.hw_id, d.op)):
        return f"{d.arm.candidate} is in quarantine here"
    now = rows.of_bucket(c, d.hw_id, d.mode, d.bucket)
    if any(s.decision.state == "pinned" for s in now):
        return "a pin holds its key here"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(Command[bool]):
    """Store this host's own proof of a decision's arm. The result is True if it serves here from now on."""

    call: ClassVar[str] = "adopt"
    decision_id: int
    parity: Parity

    def run(self, tx: Transaction) -> bool:
        d = rows.one(tx.c, self.decision_id).decision
        rows.put_parity(tx.c, tx.host, d.hw_id, d.workload, d.arm, self.parity)
        return any(s.decision.id == d.id for s in serving.of(tx.c, tx.prover))
