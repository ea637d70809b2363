"""Stage 9: `autosel tune` as a user calls it, on the model; its decisions are this machine's from then on."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.verb import verb

UNIT_S = 3600.0
UNDECIDED = 5  # the exit code of a tune that some races left open


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """An op a unit: a tune that is interrupted keeps what it has decided, and this stage goes on at the next op."""
    return list(dict.fromkeys(n.workload.op for n in scope.workloads(batches=(1,)) if _wanted(n.workload.op, scope)))


def _wanted(op: str, scope: Scope) -> bool:
    return op in scope.tuned_ops if scope.tuned_ops else op not in ("paged_attn", "prefill_attn")


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Not ok where the tune fails, or a candidate of ours fails its proof or falls in a race."""
    arguments = ["--model", scope.model, "--seq", str(scope.seq), "--op", unit, "--device", scope.device, "--seed", "1"]
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
    columns = ("op", "workload", "state", "candidate", "us", "x baseline (lower bound)", "roofline")
    told = (f"{undecided} undecided",) if undecided else ()
    return Table(columns=columns, rows=tuple(rows), remarks=told)
