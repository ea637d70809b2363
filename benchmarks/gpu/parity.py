"""Stage 2: every candidate's whole proof, in a worker, as `tune` takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autosel.values import Failed, Fingerprint, to_json
from benchmarks.gpu.entrants import Entry, entries, entry_named
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.toolchain import lacking

if TYPE_CHECKING:
    from benchmarks.gpu.proofs import Proofs

UNIT_S = 1800.0  # the deadlines of a build and of a proof are 900 and 600 s


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """One for each build of each candidate, dtype and op; a candidate that refuses every shape is a unit too, and says
    why. It has failed if it is ours, and refused because of what is not installed here."""
    return [entry.name for entry in entries(scope, fp)]


def expect(units: Sequence[str], scope: Scope, fp: Fingerprint) -> None:
    """Begin with these proofs."""
    from benchmarks.gpu.proofs import Proofs

    listed = {entry.name: entry for entry in entries(scope, fp)}
    _begun[:] = [Proofs([listed[unit] for unit in units if not listed[unit].refused], scope, fp)]


_begun: list[Proofs] = []  # this process's, of the units that are to come


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    entry = entry_named(unit, scope, fp)
    if entry.refused:
        lacks = lacking(entry.candidate, entry.workload.dtype, scope, fp)
        outcome = "cannot be built" if lacks else "refused"
        return {"ok": not lacks, "outcome": outcome, "reason": lacks or entry.refused}
    if not _begun or unit not in _begun[0]:
        expect([unit], scope, fp)
    found = _begun[0].of(unit)
    passed = not isinstance(found, Failed)
    plain = to_json(found)
    return {"ok": passed or _excused(entry), "outcome": "passed" if passed else "failed", **_told(plain), **plain}


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
