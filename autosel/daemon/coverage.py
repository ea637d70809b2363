"""Hold the coverage that each process of this home reported last: the share of its time in ops that decisions serve."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from autosel.candidates import registry
from autosel.daemon.bodies import Bad
from autosel.errors import UnknownName
from autosel.values import ServedCalls, to_json

MOST_CLIENTS = 256  # processes remembered; the one without news for longest is forgotten first
MOST_PARTS = 128
MOST_COUNT = 1 << 53


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
        if len(self._last) > MOST_CLIENTS:
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
        try:
            registry.op_name(op)
        except UnknownName as error:
            raise Bad(422, f"no such op: {op!r:.80}") from error
