"""Stage 10: sweep the model's step over contexts and over batches with `autosel sweep`."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.verb import verb

UNIT_S = 4 * 3600.0
UNDECIDED = 5  # the exit code of a sweep that left some races undecided


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return ["contexts", "batches"]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Run one sweep; `ok` if every cell that fits into memory was measured and is correct."""
    grid = ("--context", scope.contexts, "--batch", "1")
    if unit == "batches":
        grid = ("--context", str(scope.batch_context), "--batch", scope.batch_range)
    words = ["--model", scope.model, "--iters", str(min(scope.iters, 20)), "--device", scope.device, *grid]
    words += ["--layers", str(scope.layers)] if scope.layers else []
    words += ["--effort", "quick", "--budget", scope.sweep_budget] if scope.sweep_budget else ["--no-tune"]
    done = verb("sweep", *words, "--json", allowed=(0, UNDECIDED))
    if "sweep" not in done:
        return {"ok": False, **done}
    wrong = [c for c in done["sweep"]["cells"] if c["figures"] and not c["figures"]["verified"]]
    why = {"reason": f"wrong at batch {wrong[0]['batch']}, context {wrong[0]['context']}"} if wrong else {}
    return {"ok": not wrong, **done, **why}


def table(found: Mapping[str, Found]) -> Table:
    rows, told = [], []
    for name, one in found.items():
        for cell in one.get("sweep", {}).get("cells", ()):
            at, f = (name, str(cell["batch"]), str(cell["context"])), cell["figures"]
            if f is None:
                told.append(f"{name}: batch {cell['batch']}, context {cell['context']}: {cell['why']}")
                continue
            times = (f"{f['p50_ms']:.3f}", f"{f['p95_ms']:.3f}", f"{f['baseline_ms']:.3f}")
            rows.append((*at, *times, f"{f['speedup']:.2f}", f"{f['tokens_per_s']:.1f}", f"{f['roofline']:.0%}"))
    columns = ("sweep", "batch", "context", "ms", "p95", "baseline ms", "speedup", "tok/s", "roofline")
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(told))
