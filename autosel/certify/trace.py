"""A run in Chrome's trace format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Two processes, each with its own time axis from 0:
timed steps  the steps of both arms in the order in which they ran, back to back: the time between them is left out
one step     an optimised step of median length: which op each thread ran when (decode.timeline)

Spans of a thread are in order, and do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autosel.certify.certificate import Certificate
from autosel.certify.derive import arithmetic
from autosel.decode.run import Span

STEPS, ONE_STEP = 1, 2  # processes
OPTIMISED, BASELINE = 1, 2  # threads of the first
ARMS = {OPTIMISED: "optimised steps", BASELINE: "baseline steps"}


def trace(made: Certificate, timeline: Sequence[Span] = ()) -> dict[str, Any]:
    """Return the trace as a JSON object; timestamps are in microseconds."""
    name = f"{made.model} {arithmetic(made)}, batch {made.shape.batch}, context {made.shape.seq}, {made.device}"
    arms = ARMS if made.baseline else {OPTIMISED: ARMS[OPTIMISED]}
    events = [*_process(STEPS, f"timed steps: {name}", arms), *_steps(made)]
    if timeline:
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(s.lane for s in timeline), 1)}
        told = f"one step, median {made.latency_ms.med:.4g} ms: {name}"
        events += [*_process(ONE_STEP, told, {n: lane for lane, n in lanes.items()}), *_ops(timeline, lanes)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"checksum": made.checksum, "repro_cmd": made.repro_cmd, "between_steps": "left out"},
    }


def _process(process: int, name: str, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Name a process and its threads, which viewers list in this order."""
    yield _named("process_name", process, 0, {"name": name})
    yield _named("process_sort_index", process, 0, {"sort_index": process})
    for thread, text in threads.items():
        yield _named("thread_name", process, thread, {"name": text})
        yield _named("thread_sort_index", process, thread, {"sort_index": thread})


def _named(kind: str, process: int, thread: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": facts}


def _steps(made: Certificate) -> Iterator[dict[str, Any]]:
    s, at_ns = made.samples, 0
    for i in range(made.iters):
        arms = (OPTIMISED, BASELINE) if made.baseline is None or s.first[i] == "1" else (BASELINE, OPTIMISED)
        for arm in arms if made.baseline else arms[:1]:
            took_ns = (s.optimised_ns if arm == OPTIMISED else s.baseline_ns)[i]
            yield _span(f"step {i}", "step", (STEPS, arm), at_ns, at_ns + took_ns, {"ms": took_ns / 1e6})
            at_ns += took_ns


def _ops(timeline: Sequence[Span], lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    for s in sorted(timeline, key=lambda s: (lanes[s.lane], s.begin_ns)):
        facts = {"site": s.site, "candidate": s.candidate} | ({"also": s.also} if s.also else {})
        yield _span(s.label, "op", (ONE_STEP, lanes[s.lane]), s.begin_ns, s.end_ns, facts)


def _span(
    name: str, category: str, where: tuple[int, int], begin_ns: int, end_ns: int, facts: dict[str, Any]
) -> dict[str, Any]:
    process, thread = where
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **times, "args": facts}
