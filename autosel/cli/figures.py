"""What the verbs say about decisions: one row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import click

from autosel.cli.output import microseconds, paragraph, ratio, state_style, table
from autosel.ledger import describe
from autosel.ledger.describe import decision_json, served_state, shape, spread
from autosel.values import WHOLE_STEP, Decision

__all__ = [
    "against_baseline",
    "decision_json",
    "decision_table",
    "served_state",
    "shape",
    "short_shape",
    "spread",
    "winner",
]


HEADERS = ("op", "workload", "winner", "time us", "vs baseline", "next best", "roofline")
NO_STALE: Mapping[int, str] = {}
MARK = "*"  # of figures taken beside other work


def decision_table(
    decisions: Sequence[Decision], labels: Mapping[str, str], stale: Mapping[int, str] = NO_STALE
) -> str:
    """The verdict table. `labels`: names of workloads by key; `stale`: why a decision, by id, does not run here."""
    rows = [_row(d, labels.get(d.workload.key, d.op), bool(stale.get(d.id))) for d in decisions]
    return "\n".join(
        [table(HEADERS, rows, right=(3,), wrap=1), *_conditions(d for d in decisions if not stale.get(d.id))]
    )


def _conditions(decisions: Iterable[Decision]) -> list[str]:
    """A line for the figures marked `*`: those that were taken beside other work."""
    marked = [(d, text) for d in decisions if (text := describe.contended(d))]
    if not marked:
        return []
    busiest = max(marked, key=lambda one: _busy_cores(one[0]))
    return [paragraph(f"{MARK} {busiest[1]}", hang="  ")]


def _busy_cores(decision: Decision) -> float:
    conditions = decision.standing.conditions if decision.standing is not None else None
    return conditions.busy_cores if conditions is not None else 0.0


def _row(decision: Decision, label: str, stale: bool) -> list[str]:
    verdict, standing = decision.verdict, decision.standing
    if stale:
        return [label, short_shape(decision), decision.baseline.backend, "", click.style("stale", fg="yellow"), "", ""]
    timing = verdict.timings.get(decision.arm.candidate) if verdict else None
    return [
        label,
        short_shape(decision),
        state_style(decision.state)(winner(decision)),
        f"{microseconds(timing.median_us)} {spread(timing)}" if timing else "-",
        against_baseline(decision),
        ratio(decision.next_best[1]) if decision.next_best else "",
        f"{standing.roofline:.0%}" if standing and standing.roofline is not None else "",
    ]


def winner(decision: Decision) -> str:
    """The backend; of a whole step, which way it is taken."""
    if decision.op != WHOLE_STEP:
        return decision.arm.backend
    if decision.arm.digest == decision.baseline.digest:
        return "op by op"
    if decision.arm.candidate.startswith("graph:"):
        return "graph"
    return "team, packed" if decision.arm.candidate.endswith("_packed") else "team"


def short_shape(decision: Decision) -> str:
    return shape(decision.workload)


def against_baseline(decision: Decision) -> str:
    """As `describe.against_baseline`, marked if it was timed beside other work."""
    text = describe.against_baseline(decision)
    if text == "undecided" or text.endswith("stale"):
        text = click.style(text, fg="yellow")
    return text + (MARK if describe.contended(decision) else "")
