"""Stage 2: every candidate's whole proof, in a worker, as `tune` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosel.values import Failed, Fingerprint, NativeRecipe, to_json
from benchmarks.gpu.entrants import Entry, entries, entry_named
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.toolchain import lacking

if TYPE_CHECKING:
    from autosel.tuning.builds import Builds

UNIT_S = 900.0  # a proof's own deadline is 600 s


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """One for each build of each candidate, dtype and op; a candidate that refuses every shape is a unit too, and says
    why. It has failed if it is ours, and refused because of what is not installed here."""
    return [entry.name for entry in entries(scope, fp)]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    from autosel.parity.check import check
    from autosel.tuning.prove import proof_of
    from autosel.tuning.shortlist import way_of

    entry = entry_named(unit, scope, fp)
    if entry.refused:
        lacks = lacking(entry.candidate, entry.workload.dtype, scope, fp)
        outcome = "cannot be built" if lacks else "refused"
        return {"ok": not lacks, "outcome": outcome, "reason": lacks or entry.refused}
    way = way_of(entry.candidate, entry.workload, fp)
    if isinstance(way.recipe, NativeRecipe):
        _builds(way.recipe, scope, fp).wait(way.recipe)
    found = check(proof_of(way, entry.workload), fp=fp, device=scope.device)
    passed = not isinstance(found, Failed)
    plain = to_json(found)
    return {"ok": passed or _excused(entry), "outcome": "passed" if passed else "failed", **_told(plain), **plain}


def _builds(first: NativeRecipe, scope: Scope, fp: Fingerprint) -> Builds:
    """This process's: the one that is needed first, then those of all units in their order, while proofs are taken."""
    from autosel.tuning.builds import Builds

    if not _begun:
        others = (e.candidate.recipe(e.workload, fp, e.candidate.knobs(e.workload, fp)) for e in _there(scope, fp))
        _begun.append(Builds([first, *(recipe for recipe in others if isinstance(recipe, NativeRecipe))]))
    return _begun[0]


_begun: list[Builds] = []


def _there(scope: Scope, fp: Fingerprint) -> list[Entry]:
    return [entry for entry in entries(scope, fp) if not entry.refused]


def _excused(entry: Entry) -> bool:
    """PyTorch's own ways and installed libraries may fail: that is a finding, not a fault of ours."""
    return entry.candidate.backend not in ("CPP", "CUDA_EXT", "CUTLASS", "TRITON")


def _told(plain: dict[str, object]) -> dict[str, object]:
    """A reason that says which check and case it was."""
    return {"reason": f"{plain['check']} ({plain['case']}): {plain['reason']}"} if "check" in plain else {}


def table(found: Mapping[str, Found]) -> Table:
    rows = []
    for name, one in sorted(found.items()):
        if one.get("outcome") in ("passed", "failed"):
            worst = f"{one['worst']:.2f}" if one["outcome"] == "passed" else ""
            cases = str(one.get("cases", ""))
            op, candidate, dtype, shape = (*name.split(" "), "")[:4]
            rows.append((op, candidate, dtype, one["outcome"], cases, worst, f"{one.get('seconds', 0):.1f}", shape))
    refused = sum(one.get("outcome") == "refused" for one in found.values())
    remarks = [f"{name}: {one['reason']}" for name, one in found.items() if one.get("outcome") == "failed"]
    if refused:
        remarks.append(f"{refused} candidates are not for this device or its shapes: parity.json says why")
    columns = ("op", "candidate", "dtype", "outcome", "cases", "worst / bound", "s", "a build for")
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(remarks))
