"""Stage 7: a decode of the model against the eager baseline, certified by `autosel run`."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.verb import verb

UNIT_S = 3600.0
REGRESSED, NOT_PROVEN = 3, 4


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return [f"batch {batch}" for batch in scope.batches]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Ok where the tokens are right and the certificate stands."""
    words = ["--model", scope.model, "--seq", str(scope.seq), "--iters", str(scope.iters), "--device", scope.device]
    words += ["--batch", unit.split()[1]]
    words += ["--layers", str(scope.layers)] if scope.layers else []
    done = verb("run", *words, "--json")
    return {"ok": "error" not in done or not done["error"], **done}


def table(found: Mapping[str, Found]) -> Table:
    rows = []
    for name, one in found.items():
        c = one.get("certificate", {})
        if "tokens_per_sec" not in c:
            continue
        times = (f"{c['latency_ms']['med']:.3f}", f"{c['latency_ms']['p95']:.3f}", f"{c['baseline_ms']:.3f}")
        roof = f"{c['roofline']:.0%}" if isinstance(c.get("roofline"), float) else ""
        rows.append((name, *times, f"{c['speedup']:.2f}", f"{c['tokens_per_sec']:.1f}", roof))
    columns = ("run", "ms", "p95", "baseline ms", "speedup", "tok/s", "roofline")
    return Table(columns=columns, rows=tuple(rows))
