"""Stage 4: capture every candidate and a whole decode step in CUDA graphs, and replay them on changed inputs.

A replay must be within the contract's bounds on contents that it was not captured with, and bit-equal to a plain call.
A CPU has no graphs; plain calls are checked instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autosel.values import Fingerprint
from benchmarks.gpu.entrants import BuildEntry, entrant, entries, entry_named
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table

if TYPE_CHECKING:
    from benchmarks.gpu.instrument import Timer

UNIT_S = 600.0
STEP = "a whole step"
SEEDS = (2, 3, 4)
STEPS = 20  # samples of a whole step in each form


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    """List each build of each candidate that this device supports, then the step."""
    return [*(e.name for e in entries(scope, fp) if not e.refused), STEP]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Check one candidate or the step. A failure counts as not `ok` only for autosel's own kernels."""
    if unit == STEP:
        return whole_step(scope)
    from benchmarks.gpu.instrument import Timer

    entry = entry_named(unit, scope, fp)
    ours = is_ours(entry.candidate.name)
    timer = Timer(fp, scope.device)
    try:
        arm = entrant(entry.candidate, entry.workload, fp)
        timer.seat(entry.workload, {arm.candidate: arm}, copies=1)
        found = replayed(timer, entry)
    except Exception as error:
        if ours:
            raise
        found = {"outcome": "raised", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        timer.close()
    return {"ok": not ours or found["outcome"] == "right", **found}


def replayed(timer: Timer, entry: BuildEntry) -> Found:
    """Replay on new contents; check each replay and compare it with a plain call on the same contents."""
    name = entry.candidate.name
    seat = timer.bench.seats[name]
    for seed in SEEDS:
        timer.renew(seed)
        seat.timed.sample(1)
        wrong = timer.wrong(name)
        if wrong:
            return {"outcome": "wrong", "how": how(seat.timed), "reason": wrong}
        replay = [t.clone() for t in timer.bench.outputs(name)]
        captured = seat.timed.result  # the graph's outputs, if the candidate allocates its own results
        seat.timed.result = seat.timed.call(*seat.timed.calls[0])  # type: ignore[attr-defined]
        called = timer.bench.outputs(name)
        seat.timed.result = captured
        if entry.candidate.deterministic and not all(same(a, b) for a, b in zip(replay, called, strict=True)):
            return {"outcome": "differs", "how": how(seat.timed), "reason": "a replay and a call differ in their bits"}
    if how(seat.timed) == "queue":
        why = "it cannot be captured; it was launched call by call"
        return {"outcome": "not captured", "how": "queue", "reason": why}
    return {"outcome": "right", "how": how(seat.timed), "replays": len(SEEDS)}


def how(timed: Any) -> str:
    """Return `graph`; `queue` if no graph could be captured; `calls` on a CPU."""
    graphs = getattr(timed, "graphs", None)
    if graphs is None:
        return "calls"
    return "queue" if None in graphs.values() else "graph"


def same(one: Any, other: Any) -> bool:
    """Return True if values are equal, or NaN in both."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def whole_step(scope: Scope) -> Found:
    """Time a decode step of the model, op by op: launched call by call, and as one graph."""
    import torch

    from autosel import devices

    with torch.inference_mode():
        step = written(scope)
        device = devices.named(scope.device)
        device.use()
        timed = device.timed(step.run, [()])
        timed.sample(1)
        graph_ms = [timed.sample(1) / 1e6 for _ in range(STEPS)]
        replay = step.logits.clone()
        eager_ms = [_clocked(step) for _ in range(STEPS)]
        right = same(replay, step.logits)
    found = {"how": how(timed), "graph_ms": middle(graph_ms), "eager_ms": middle(eager_ms), "calls": len(step.calls)}
    if not right or found["how"] == "queue":
        why = "the replay's logits differ" if not right else "the step cannot be captured"
        return {"ok": False, "outcome": "wrong" if not right else "not captured", "reason": why, **found}
    return {"ok": True, "outcome": "right", **found}


def written(scope: Scope) -> Any:
    """Return the step that `autosel run` makes (decode.step.Step), with a filled cache."""
    from autosel.decode.step import write_step

    scene = set_up(scope, scope.model, layers=scope.layers, seq=scope.seq)
    return write_step(scene.decoder, scene.cache, scene.place)


def set_up(scope: Scope, name: str, *, layers: int, seq: int) -> Any:
    """Return a decode.scene.Scene: random weights, a filled cache, and one sequence before its next token."""
    from time import perf_counter_ns

    from autosel import fingerprint, models
    from autosel.decode.run import Plan, Silent
    from autosel.decode.scene import set_scene
    from autosel.decode.weights import load_weights

    model = models.load(name)
    layers %= model.layers
    plan = Plan(
        model=model, layers=layers, dtype=model.dtype, seq=seq, prompt="synthetic", iters=1, device=scope.device
    )
    return set_scene(plan, load_weights(plan), fingerprint.take(scope.device), Silent(), perf_counter_ns)


def _clocked(step: Any) -> float:
    begin = perf_counter()
    step.run()
    step.settle()
    return (perf_counter() - begin) * 1e3


def middle(times: list[float]) -> float:
    return round(statistics.median(times), 4)


def table(found: Mapping[str, Found]) -> Table:
    rows = []
    for name, one in sorted(found.items()):
        if name != STEP and "outcome" in one:
            op, candidate, dtype, shape = (*name.split(" "), "")[:4]
            seconds = f"{one.get('seconds', 0):.1f}"
            rows.append((op, candidate, dtype, one["outcome"], one.get("how", ""), seconds, shape))
    told = [f"{name}: {one['reason']}" for name, one in found.items() if one.get("outcome") not in (None, "right")]
    step = found.get(STEP, {})
    if "graph_ms" in step:
        gain = step["eager_ms"] / step["graph_ms"]
        text = f"a whole step of {step['calls']} calls: {step['eager_ms']:.3f} ms call by call"
        graph = f", {step['graph_ms']:.3f} ms as {step['how']}, {gain:.2f} times as fast"
        told.append(text + ("; a CPU has no graph to replay" if step["how"] == "calls" else graph))
    columns = ("op", "candidate", "dtype", "outcome", "as", "s", "a build for")
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(told))
