"""A run in Chrome's trace format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

arms every timed step of both arms, in the order they ran, back to back: the time between them is left out median step
each op with the time of all its calls of a step, slowest first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autosel.certify.audit import Audit, Row, audit
from autosel.certify.certificate import Certificate
from autosel.certify.derive import arithmetic

PROCESS = 1
OPTIMISED, BASELINE, OPS = 1, 2, 3  # threads: one lane each
LANES = {OPTIMISED: "optimised steps", BASELINE: "baseline steps", OPS: "median optimised step, by op"}


def trace(made: Certificate) -> dict[str, Any]:
    """Return the trace as a JSON object; timestamps are in microseconds."""
    name = f"{made.model} {arithmetic(made)}, batch {made.shape.batch}, context {made.shape.seq}, {made.device}"
    events = [_named("process_name", 0, name)]
    events += [_named("thread_name", lane, text) for lane, text in LANES.items()]
    events += [*_steps(made), *_ops(audit(made))]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"checksum": made.checksum, "repro_cmd": made.repro_cmd, "gaps": "left out"},
    }


def _named(kind: str, lane: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": lane, "args": {"name": text}}


def _steps(made: Certificate) -> Iterator[dict[str, Any]]:
    s, at = made.samples, 0.0
    for i, coin in enumerate(s.first):
        for lane in (OPTIMISED, BASELINE) if coin == "1" else (BASELINE, OPTIMISED):
            duration = (s.optimised_ns if lane == OPTIMISED else s.baseline_ns)[i] / 1e3
            yield _slice(f"step {i}", "step", lane, at, duration, {"ms": duration / 1e3})
            at += duration


def _ops(found: Audit) -> Iterator[dict[str, Any]]:
    at = 0.0
    for row in found.rows:
        yield _slice(row.label, row.backend, OPS, at, row.time_us, _facts(row))
        at += row.time_us
    if found.rest_us > 0:
        yield _slice("rest", "rest", OPS, at, found.rest_us, {"share": found.rest_share})


def _facts(row: Row) -> dict[str, Any]:
    return {
        "candidate": row.candidate,
        "calls": row.calls,
        "us a call": row.call_us,
        "share": row.share,
        "bytes": row.bytes,
        "flops": row.flops,
        "roofline": row.roofline,
        "limit": row.limit,
    }


def _slice(
    name: str, category: str, lane: int, start_us: float, duration_us: float, facts: dict[str, Any]
) -> dict[str, Any]:
    where = {"pid": PROCESS, "tid": lane, "ts": round(start_us, 3), "dur": round(duration_us, 3)}
    return {"name": name, "cat": category, "ph": "X", **where, "args": facts}
