"""What the verbs say about decisions: one row of a table, one object of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from autosel.cli.output import microseconds, ratio, state_style, table
from autosel.values import Decision, Timing, Verdict, Workload


def decision_json(decision: Decision) -> dict[str, Any]:
    """The JSON of `best OP --json`, and of each decision of `tune --json`."""
    verdict = decision.verdict
    timing = verdict.timings.get(decision.arm.candidate) if verdict else None
    base = verdict.timings.get(decision.baseline.candidate) if verdict else None
    return {
        "op": decision.op,
        "workload": decision.workload.key,
        "bucket": decision.bucket,
        "length_range": decision.length_range,
        "state": served_state(decision),
        "backend": decision.arm.backend,
        "candidate": decision.arm.candidate,
        "decision_id": decision.id,
        "speedup": _speedup(verdict),
        "next_best": _next_best(verdict),
        "baseline_us": base.median_us if base else None,
        "time_us": timing.median_us if timing else None,
        "time_interval_us": [timing.lo_us, timing.hi_us] if timing else None,
        "roofline": verdict.roofline if verdict else None,
        "read_bytes_per_s": verdict.read_bytes_per_s if verdict else None,
        "outcome": verdict.outcome if verdict else None,
        "reason": decision.reason,
        "knobs": dict(decision.arm.knobs),
        "created_at": decision.created_at,
    }


def served_state(decision: Decision) -> str:
    """promoted, kept, pinned or baseline: what a caller of best() gets."""
    return decision.state if decision.state in ("promoted", "kept", "pinned") else "baseline"


def _speedup(verdict: Verdict | None) -> dict[str, float] | None:
    if verdict is None or verdict.effect is None:
        return None
    return {"median": verdict.effect.median, "lo": verdict.effect.lo, "hi": verdict.effect.hi}


def _next_best(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None or verdict.next_best is None:
        return None
    return {"candidate": verdict.next_best[0], "speedup": verdict.next_best[1]}


HEADERS = ("op", "workload", "winner", "time us", "vs baseline", "next best", "roofline")
NO_STALE: Mapping[int, str] = {}


def decision_table(
    decisions: Sequence[Decision], labels: Mapping[str, str], stale: Mapping[int, str] = NO_STALE
) -> str:
    """The verdict table. `labels`: names of workloads by key; `stale`: why a decision, by id, does not run here."""
    rows = [_row(d, labels.get(d.workload.key, d.op), bool(stale.get(d.id))) for d in decisions]
    return table(HEADERS, rows, right=(3,), wrap=1)


def _row(decision: Decision, label: str, stale: bool) -> list[str]:
    verdict = decision.verdict
    if stale:
        return [label, short_shape(decision), decision.baseline.backend, "", click.style("stale", fg="yellow"), "", ""]
    timing = verdict.timings.get(decision.arm.candidate) if verdict else None
    return [
        label,
        short_shape(decision),
        state_style(decision.state)(decision.arm.backend),
        f"{microseconds(timing.median_us)} {spread(timing)}" if timing else "-",
        against_baseline(decision),
        ratio(verdict.next_best[1]) if verdict and verdict.next_best else "",
        f"{verdict.roofline:.0%}" if verdict and verdict.roofline is not None else "",
    ]


def short_shape(decision: Decision) -> str:
    return shape(decision.workload)


def shape(w: Workload) -> str:
    """`B1 H32/8 D128 L8192`, `M1 K4096 N28672`: the dimensions people know, nothing else."""
    dims = dict(w.dims)
    if "Hq" in dims and "Hkv" in dims:
        dims = {"H": f"{dims.pop('Hq')}/{dims.pop('Hkv')}", **dims}  # type: ignore[dict-item]
    for dull in ("S", "R"):
        if dull in dims and (dull == "R" or dims[dull] == 1):
            dims.pop(dull)
    first = [n for n in ("B", "M") if n in dims]
    order = [*first, *(n for n in dims if n not in first)]
    traits = "".join(f" {n}={v}" for n, v in w.traits if n not in ("residual",))
    return " ".join(f"{n}{dims[n]}" for n in order) + traits


def spread(timing: Timing) -> str:
    """Half the interval of the median, right-aligned to five characters."""
    half = max(timing.hi_us - timing.median_us, timing.median_us - timing.lo_us) / timing.median_us
    return f"{f'±{half:.1%}' if half < 0.0995 else f'±{half:.0%}' if half < 1 else 'noisy':>5}"


def against_baseline(decision: Decision) -> str:
    """`23x ≥22`: the lower confidence bound is the only number a promotion rests on. A tie is said."""
    if decision.state in ("pinned", "demoted", "quarantined"):
        return decision.state
    verdict = decision.verdict
    if verdict is None:
        return "not raced"
    if verdict.outcome == "promote" and verdict.effect is not None:
        return f"{ratio(verdict.effect.median)} ≥{ratio(verdict.effect.lo)[:-1]}"
    if decision.arm.digest != decision.baseline.digest and verdict.effect is not None:
        return f"{ratio(verdict.effect.median)} kept"
    words = {"tie": "tie", "lose": "baseline", "undecided": click.style("undecided", fg="yellow")}
    return words.get(verdict.outcome, verdict.outcome)
