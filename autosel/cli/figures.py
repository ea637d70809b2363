"""Decisions as rows of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import click

from autosel.cli.output import paragraph, state_style, table
from autosel.ledger import describe
from autosel.ledger.describe import microseconds, ratio, shape, spread
from autosel.values import WHOLE_STEP, Decision

HEADERS = ("op", "workload", "winner", "time us", "vs baseline", "next", "roof")
NO_STALE: Mapping[int, str] = {}
MARK = "*"  # marks figures timed while other work ran


def decision_table(
    decisions: Sequence[Decision], labels: Mapping[str, str], stale: Mapping[int, str] = NO_STALE
) -> str:
    """Return the table of verdicts. `labels` names workloads by key; `stale` says by id why a decision does not run
    here. The lengths of one op come together, shortest first.
    """
    rows = [_row(d, labels.get(d.workload.key, d.op), bool(stale.get(d.id))) for d in by_length(decisions)]
    return "\n".join(
        [table(HEADERS, rows, right=(3,), wrap=1), *_conditions(d for d in decisions if not stale.get(d.id))]
    )


def by_length(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions with those that differ only in their context length together, shortest first.

    Tuning decides attention last, and a second tune lists settled decisions first.
    """
    groups: dict[tuple[object, ...], list[Decision]] = {}
    for d in decisions:
        w = d.workload
        others = tuple(dim for dim in w.dims if dim[0] != "L")
        groups.setdefault((d.mode, d.hw_id, w.op, others, w.dtype, w.traits), []).append(d)
    return [d for group in groups.values() for d in sorted(group, key=lambda d: dict(d.workload.dims).get("L", 0))]


def _conditions(decisions: Iterable[Decision]) -> list[str]:
    """Return a line that explains the mark `*`: figures timed while other work ran."""
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
    what = [label, shape(decision.workload)]
    if stale:
        return [*what, decision.baseline.backend, "", click.style("stale", fg="yellow"), "", ""]
    timing = verdict.timings.get(decision.arm.candidate) if verdict else None
    return [
        *what,
        state_style(decision.state)(winner(decision)),
        f"{microseconds(timing.median_us)} {spread(timing)}" if timing else "-",
        against_baseline(decision),
        ratio(decision.next_best[1]) if decision.next_best else "",
        f"{standing.roofline:.0%}" if standing and standing.roofline is not None else "",
    ]


def winner(decision: Decision) -> str:
    """Return the backend of the winner; for a whole step, its form."""
    if decision.op != WHOLE_STEP:
        return decision.arm.backend
    if decision.arm.digest == decision.baseline.digest:
        return "op by op"
    if decision.arm.candidate.startswith("graph:"):
        return "graph"
    return "team, packed" if decision.arm.candidate.endswith("_packed") else "team"


def against_baseline(decision: Decision) -> str:
    """Return `describe.against_baseline`, marked if it was timed while other work ran."""
    text = describe.against_baseline(decision)
    if text == "undecided" or text.endswith("stale"):
        text = click.style(text, fg="yellow")
    return text + (MARK if describe.contended(decision) else "")
