"""Stage 7: compare the closed forms with an exhaustive sweep, using benchmarks/bench_regret.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table

# On a GPU some knobs are compiled in: a CUTLASS cell has six to eight builds of a minute each on one core.
UNIT_S = 1800.0


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """List the cells that at least one of autosel's kernels supports here."""
    from benchmarks import bench_regret as regret

    found = [c for c in regret.cells(fp.kind) if not scope.ops or c.workload.op in scope.ops]
    return [c.name for c in found if regret.kernels_of(c, fp)]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Measure one cell. Only a wrong result is not `ok`: the goals for regret are judged over all cells."""
    from benchmarks import bench_regret as regret
    from benchmarks.gpu.instrument import Timer

    cell = next(c for c in regret.cells(fp.kind) if c.name == unit)
    timer = Timer(fp, scope.device)
    try:
        found = regret.measure(cell, timer, scope.cell_seconds, Random(7))
        told = "; ".join(f"{setting}: {why}" for setting, why in found.get("wrong", {}).items())
        return {"ok": not told, **found, **({"reason": told} if told else {})}
    except regret.Mistaken as error:
        return {"ok": False, "reason": str(error)}
    except LookupError as error:
        return {"ok": True, "left out": str(error)}
    except regret.Disturbed:
        return {"ok": True, "left out": "other processes kept this machine busy"}
    finally:
        timer.close()


def table(found: Mapping[str, Found]) -> Table:
    from benchmarks import bench_regret as regret

    measured = [one for one in found.values() if "regret" in one]
    rows = []
    for one in sorted(measured, key=lambda one: -one["regret"]):
        between = f"{one['low']:.1%} .. {one['high']:.1%}"
        shown = (f"{one['regret']:.1%}", between, f"{one['closed_us']:.1f}", f"{one['best_us']:.1f}")
        rows.append((one["kind"], one["kernel"], one["workload"], *shown))
    told = [
        f"{kind}: geomean {s['geomean']:.1%}, p95 {s['p95']:.1%}, worst {s['worst']:.1%} of {s['cells']:.0f}"
        for kind, s in regret.summary(measured).items()
    ]
    for why, count in Counter(one["left out"] for one in found.values() if "left out" in one).items():
        told.append(f"{count} of {len(found)} cells left out: {why}")
    columns = ("kind", "kernel", "workload", "regret", "95 %", "closed us", "best us")
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(told))
