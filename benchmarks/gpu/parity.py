"""Stage 2: run every candidate's whole proof in a worker, as `tune` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autosel.values import Failed, Fingerprint, to_json
from benchmarks.gpu.entrants import entries, entry_named
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.toolchain import lacking

if TYPE_CHECKING:
    from benchmarks.gpu.proofs import Proofs

UNIT_S = 1800.0  # the deadlines of a build and of a proof are 900 and 600 s


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """Return one unit for each build of each candidate, dtype and op.

    A candidate that refuses every shape is also a unit, with the reason. For autosel's own kernels it has failed if
    the reason is missing software.
    """
    return [entry.name for entry in entries(scope, fp)]


def expect(units: Sequence[str], scope: Scope, fp: Fingerprint) -> None:
    from benchmarks.gpu.proofs import Proofs

    listed = {entry.name: entry for entry in entries(scope, fp)}
    _begun[:] = [Proofs([listed[unit] for unit in units if not listed[unit].refused], scope, fp)]


_begun: list[Proofs] = []  # the proofs of this process's coming units


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
    ok = passed or not is_ours(entry.candidate.name)
    return {"ok": ok, "outcome": "passed" if passed else "failed", **_told(plain), **plain}


def _told(plain: dict[str, object]) -> dict[str, object]:
    """Return a reason that names the check and the case."""
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
        remarks.append(f"{refused} candidates do not support this device or its shapes; parity.json has the reasons")
    columns = ("op", "candidate", "dtype", "outcome", "cases", "worst / bound", "s", "a build for")
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(remarks))
