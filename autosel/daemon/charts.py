"""Build charts for plotly.js as plain data. The page sets colours and axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from autosel.certify.certificate import Certificate
from autosel.ledger.describe import shape
from autosel.values import Decision, Timing, Verdict


def candidates(decisions: Sequence[Decision]) -> list[str]:
    """List all candidates that were timed, serving ones first, the baseline last."""
    serve = dict.fromkeys(d.arm.candidate for d in decisions)
    bases = dict.fromkeys(d.baseline.candidate for d in decisions)
    timed = dict.fromkeys(name for d in decisions if d.verdict for name in d.verdict.timings)
    middle = [n for n in [*serve, *timed] if n not in bases]
    return [*dict.fromkeys(middle), *bases]


def times(
    decisions: Sequence[Decision], moved: Mapping[str, int], axis: str, stale: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Plot time against size for each candidate, with its interval, the roofline, and the changes of the serving
    kernel. `stale`: by decision; the baseline serves there."""
    series = []
    for name in candidates(decisions):
        points = [
            (d.workload[axis], d.verdict.timings[name]) for d in decisions if d.verdict and name in d.verdict.timings
        ]
        if points:
            baseline = any(d.baseline.candidate == name for d in decisions)
            times_us = _intervals([t for _, t in points], "y")
            series.append({"name": name, "baseline": baseline, "x": [x for x, _ in points], **times_us})
    return {
        "kind": "times",
        "axis": {"L": "context, tokens", "M": "rows", "B": "batch"}.get(axis, axis),
        "series": series,
        "roofline": _roofline(decisions, moved, axis),
        "crossovers": _crossovers(decisions, axis, stale or {}),
    }


def _intervals(timings: Sequence[Timing], median: str) -> dict[str, list[float]]:
    return {
        median: [t.median_us for t in timings],
        "lo": [t.lo_us for t in timings],
        "hi": [t.hi_us for t in timings],
        "p95": [t.p95_us for t in timings],
    }


def _roofline(decisions: Sequence[Decision], moved: Mapping[str, int], axis: str) -> dict[str, Any] | None:
    """Plot the time for reading the operands at the read rate of each race, the lower limit for every kernel."""
    points = []
    for d in decisions:
        floor = floor_us(d.verdict, moved.get(str(d.id)))
        if floor is not None:
            points.append((d.workload[axis], floor))
    return {"x": [x for x, _ in points], "y": [y for _, y in points]} if points else None


def floor_us(verdict: Verdict | None, moved: int | None) -> float | None:
    if verdict is None or not verdict.read_bytes_per_s or not moved:
        return None
    return moved / verdict.read_bytes_per_s * 1e6


def _crossovers(decisions: Sequence[Decision], axis: str, stale: Mapping[str, str]) -> list[dict[str, Any]]:
    """Mark where another candidate starts to serve: at the start of a row's range, else between two neighbours."""

    def serves(d: Decision) -> str:
        return d.baseline.candidate if str(d.id) in stale else d.arm.candidate

    found = []
    for before, after in pairwise(decisions):
        if serves(before) != serves(after):
            low, high = before.workload[axis], after.workload[axis]
            at, where = (low * high) ** 0.5, f"between {low} and {high}"
            if after.length_range or high == low + 1:
                first = after.length_range[0] if after.length_range else high
                at, where = float(first), f"from {first} on"
            found.append({"x": at, "from": serves(before), "to": serves(after), "where": where})
    return found


def forest(decision: Decision) -> dict[str, Any]:
    """Plot every candidate of a race with median and interval."""
    v = decision.verdict
    rows = sorted(v.timings.items(), key=lambda item: item[1].median_us) if v else []
    return {
        "kind": "forest",
        "title": f"{decision.op} {shape(decision.workload)}",
        "winner": v.winner if v else "",
        "baseline": decision.baseline.candidate,
        "names": [name for name, _ in rows],
        **_intervals([t for _, t in rows], "median"),
    }


def tokens(certificates: Sequence[Certificate]) -> dict[str, Any]:
    """Plot tokens per second over time, one line per configuration, with its baseline."""
    lines: dict[str, list[Certificate]] = {}
    for c in reversed(certificates):
        lines.setdefault(f"{c.model} {c.dtype} B{c.shape.batch} L{c.shape.seq}", []).append(c)
    return {
        "kind": "tokens",
        "series": [
            {
                "name": name,
                "x": [c.timestamp for c in found],
                "y": [c.tokens_per_sec for c in found],
                "baseline": [
                    c.tokens_per_sec * c.latency_ms.med / c.baseline.med if c.baseline else None for c in found
                ],
                "sequence": [c.sequence for c in found],
            }
            for name, found in lines.items()
        ],
    }
