"""Count served calls by candidate, as reported by the processes of this home since this daemon started (proof of use);
keep the coverage that each reported last: the share of its time in ops that decisions serve.

A process reports the calls since its last report, with a serial number. A report that is repeated because its answer
was lost counts once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autosel.candidates import registry
from autosel.daemon.bodies import Bad
from autosel.errors import UnknownName
from autosel.ledger import conditions
from autosel.values import ELSEWHERE, Decision, ServedCalls, to_json

MOST_CLIENTS = 4096  # processes remembered; the one without news for longest is forgotten first
MOST_KEYS = 8192
MOST_TOLD = 512  # rows in a report
SILENT_S = 60.0  # a process without reports for so long no longer counts as calling
MOST_COVERED = 256  # processes whose coverage is remembered
MOST_PARTS = 128
MOST_COUNT = 1 << 53
OTHER = "other"  # stands for a candidate that neither this ledger nor this autosel knows


@dataclass(frozen=True, slots=True, kw_only=True)
class UseCount:
    """Report `calls` more of one op by one candidate. `decision_id` None: without a decision; `conditions` then names
    one for other conditions, as `tuned with 2 threads, running with 1`."""

    op: str
    candidate: str
    decision_id: int | None
    calls: int
    conditions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseReport:
    """Hold a process's report: `client` names it, `serial` grows with each report."""

    client: str
    serial: int
    uses: tuple[UseCount, ...]


class UseCounts:
    """Hold the counts. Only in the event loop's thread."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, int | None, str], int] = {}
        self._clients: OrderedDict[str, tuple[int, float]] = OrderedDict()  # serial and time of the last report

    def take(self, report: UseReport, served: Iterable[Decision]) -> list[UseCount]:
        """Count a report; return its rows under known names. Raises Bad."""
        if len(report.uses) > MOST_TOLD:
            raise Bad(422, f"{len(report.uses)} uses", why=f"at most {MOST_TOLD} at a time")
        if any(not 0 <= u.calls <= 1 << 53 for u in report.uses):
            raise Bad(422, "a number of calls that no process makes")
        known = {(d.op, arm.candidate) for d in served for arm in (d.arm, d.baseline)}
        fresh = [_named(u, known) for u in report.uses]
        last, _ = self._clients.pop(report.client, (0, 0.0))
        self._clients[report.client] = max(last, report.serial), time.monotonic()
        if len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        if report.serial <= last:
            return []
        for u in fresh:
            key = (u.op, u.candidate, u.decision_id, u.conditions)
            key = key if key in self._calls or len(self._calls) < MOST_KEYS else (u.op, OTHER, None, "")
            self._calls[key] = self._calls.get(key, 0) + u.calls
        return fresh

    def document(self) -> dict[str, Any]:
        """Return the sums, most called first. `processes`: how many have reported within the last minute."""
        now = time.monotonic()
        rows = [
            {"op": op, "candidate": candidate, "decision_id": number, "conditions": other, "calls": calls}
            for (op, candidate, number, other), calls in sorted(
                self._calls.items(), key=lambda item: (-item[1], str(item[0]))
            )
        ]
        lively = sum(now - seen < SILENT_S for _, seen in self._clients.values())
        return {"processes": lively, "calls": sum(self._calls.values()), "uses": rows}


def _present_name(op: str) -> str:
    """Return an op's name in the ledger. Raises Bad for an unknown op."""
    try:
        return registry.op_name(op)
    except UnknownName as error:
        raise Bad(422, f"no such op: {op!r:.80}") from error


def _named(told: UseCount, known: set[tuple[str, str]]) -> UseCount:
    """Return a row with known names. Raises Bad for an unknown op."""
    op = _present_name(told.op)
    ours = {(c.op, c.name) for c in registry.own_candidates()}
    candidate = told.candidate if told.candidate == ELSEWHERE or (op, told.candidate) in known | ours else OTHER
    other = conditions.told_in(told.conditions) if told.decision_id is None else ""
    return UseCount(op=op, candidate=candidate, decision_id=told.decision_id, calls=told.calls, conditions=other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """Report all calls of a process so far. `share`: of their time, served by decisions; `left_out`: calls beyond the
    parts that take most time."""

    client: str
    process: int
    engine: str
    mode: str
    share: float | None
    parts: tuple[ServedCalls, ...]
    left_out: int


class Coverages:
    """Hold the last report of each process. Only in the event loop's thread."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[Covered, float]] = OrderedDict()

    def take(self, report: Covered) -> None:
        """Keep a report in place of the process's last one. Raises Bad."""
        _refuse_odd(report)
        self._last.pop(report.client, None)
        self._last[report.client] = report, time.monotonic()
        if len(self._last) > MOST_COVERED:
            self._last.popitem(last=False)

    def document(self) -> dict[str, Any]:
        """Return the reports, newest first. `silent_s`: seconds since a process reported."""
        now = time.monotonic()
        found = [{**to_json(report), "silent_s": round(now - seen, 1)} for report, seen in self._last.values()]
        return {"processes": found[::-1]}


def _refuse_odd(report: Covered) -> None:
    if len(report.parts) > MOST_PARTS:
        raise Bad(422, f"{len(report.parts)} parts", why=f"at most {MOST_PARTS} at a time")
    texts = [report.client, report.engine, report.mode]
    texts += [text for p in report.parts for text in (p.bucket, p.candidate, p.why)]
    if not all(text.isprintable() for text in texts):
        raise Bad(422, "a text with characters that cannot be printed")
    counts = [report.process, report.left_out, *(p.calls for p in report.parts)]
    times = [p.us_per_call for p in report.parts if p.us_per_call is not None]
    if not all(0 <= n <= MOST_COUNT for n in (*counts, *times)) or not 0 <= (report.share or 0.0) <= 1:
        raise Bad(422, "a number that no process reports")
    for op in {p.op for p in report.parts}:
        _present_name(op)
