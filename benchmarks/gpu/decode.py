"""Stage 9: decode the models with `autosel run`, which certifies each run against the eager baseline.

At the model's context: one sequence, several sequences, and two tokens of one stream in flight. The step runs as one
native call (`persistent`), as a graph, and call by call. The other models run at that context and at a short one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.verb import verb

UNIT_S = 3600.0
SHORT = 256
WHOLE, GRAPH, CALLS = "persistent", "graph", "call by call"


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return list(runs(scope))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Describe one run: `batch` sequences (or tokens of one stream, depending on `words`) at a context of `seq`."""

    model: str
    seq: int
    batch: int = 1
    words: tuple[str, ...] = ()  # command-line words other than model, context and layers


def runs(scope: Scope) -> dict[str, Decode]:
    """Return the run of each unit. The tune stage (tune.py) tunes the same runs."""

    def base(*words: str, batch: int = 1) -> Decode:
        return Decode(model=scope.model, seq=scope.seq, batch=batch, words=words)

    found = {f"batch {batch}": base("--batch", str(batch), batch=batch) for batch in scope.batches}
    found["small batch 2"] = base("--small-batch", "2", batch=2)
    found[WHOLE] = base("--step", "whole")
    if scope.on_gpu:
        found[GRAPH] = base("--step", "graph")
    found[CALLS] = base("--step", "ops")
    for model in scope.models:
        for seq in dict.fromkeys((min(SHORT, scope.seq), scope.seq)):
            if model != scope.model or seq != scope.seq:
                found[f"{short(model)} at {seq}"] = Decode(model=model, seq=seq)
    return found


def short(model: str) -> str:
    """Return the last part of a checkpoint folder, so that results contain no local paths."""
    return model.rstrip("/").rpartition("/")[2]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Run one decode; `ok` is true if the run succeeded and its certificate holds."""
    asked = runs(scope)[unit]
    words = ["--model", asked.model, "--seq", str(asked.seq), "--iters", str(scope.iters), "--device", scope.device]
    words += ["--layers", str(scope.layers)] if scope.layers else []
    done = verb("run", *words, *asked.words, "--json")
    error = done.get("error")
    why = {"reason": error if isinstance(error, str) else f"{error['what']}: {error['why']}"} if error else {}
    return {"ok": not error, **done, **why}


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
    ms = {name: found[name]["certificate"]["latency_ms"]["med"] for name, *_ in rows}
    forms = [name for name in (WHOLE, GRAPH) if {name, CALLS} <= set(ms)]
    told = [f"a step as {name} is {ms[CALLS] / ms[name]:.2f} times as fast as {CALLS}" for name in forms]
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(told))
