"""Stage 8: run `autosel tune` on all decoded workloads, as a user does; later runs use its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosel.values import Fingerprint
from benchmarks.gpu import decode
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.verb import verb

UNIT_S = 3600.0
UNDECIDED = 5  # the exit code of a tune that left some races undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """One op of a model at a batch, at every length up to a context."""

    op: str
    model: str
    batch: int
    seq: int


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """List one unit for each op of a model and batch.

    An interrupted tune keeps its decisions, and the stage continues at the next unit.
    """
    return list(jobs(scope))


def jobs(scope: Scope) -> dict[str, Tuned]:
    """Return the job of each unit: together every workload of the decode stage's runs, each in the first run that has
    it."""
    from autosel import models
    from autosel.models.workloads import step

    found: dict[str, Tuned] = {}
    covered: set[str] = set()
    for run in sorted(decode.runs(scope).values(), key=lambda r: -r.seq):  # a long context covers the shorter ones
        named = step(models.load(run.model), batch=run.batch, context=run.seq, ops=scope.tuned_ops or None)
        at = "" if run.seq == scope.seq else f" at {run.seq}"
        for w in (n.workload for n in named if n.workload.key not in covered):
            unit = f"{w.op} {decode.short(run.model)} batch {run.batch}{at}"
            found.setdefault(unit, Tuned(op=w.op, model=run.model, batch=run.batch, seq=run.seq))
        covered |= {n.workload.key for n in named}
    return found


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Run one tune; `ok` is false if it fails, or if an autosel kernel fails its build, its proof or a race."""
    job = jobs(scope)[unit]
    arguments = ["--model", job.model, "--batch", str(job.batch), "--seq", str(job.seq), "--op", job.op]
    arguments += ["--device", scope.device, "--seed", "1"]
    done = verb("tune", *arguments, "--json", allowed=(0, UNDECIDED))
    if "decisions" not in done:
        return {"ok": False, **done}
    fallen = [r for r in done["rejected"] if r["stage"] in ("build", "parity", "race")]
    ours = [r for r in fallen if is_ours(r["candidate"])]
    why = {"reason": f"{ours[0]['candidate']}: {ours[0]['reason']}"} if ours else {}
    return {"ok": not ours, **done, **why}


def table(found: Mapping[str, Found]) -> Table:
    rows, undecided = [], 0
    for name, one in found.items():
        undecided += len(one.get("undecided", ()))
        for d in one.get("decisions", ()):
            speedup = f"{d['speedup']['median']:.2f} ({d['speedup']['lo']:.2f})" if d["speedup"] else ""
            roof = f"{d['roofline']:.0%}" if d["roofline"] else ""
            time_us = f"{d['time_us']:.1f}" if d["time_us"] else ""
            rows.append((name, d["workload"], d["state"], d["candidate"], time_us, speedup, roof))
    columns = ("tuned", "workload", "state", "candidate", "us", "x baseline (lower bound)", "roofline")
    told = (f"{undecided} undecided",) if undecided else ()
    return Table(columns=columns, rows=tuple(rows), remarks=told)
