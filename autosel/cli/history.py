"""List every decision, newest first (`explain --history`). Recorded decisions are never edited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from autosel import settings
from autosel.candidates.registry import ledger_name
from autosel.cli.best import measured_by
from autosel.cli.device import default_device
from autosel.cli.figures import against_baseline
from autosel.cli.output import emit_json, paragraph, state_style, table
from autosel.ledger.describe import contended, decision_json
from autosel.values import Decision

if TYPE_CHECKING:
    from autosel.ledger.store import Ledger


def show_history(ledger: Ledger, op: str | None, limit: int, as_json: bool) -> None:
    """Print the decisions about `op` (or all), newest first, with their reasons."""
    found = ledger.history(ledger_name(op) if op is not None else None, limit=limit)
    if as_json:
        emit_json([{**decision_json(d), "state": d.state, "hw_id": d.hw_id} for d in found])
        return
    if not found:
        click.echo(f"no decisions{f' about {op}' if op else ''} yet: the baseline serves")
        click.echo(f"measure:  {settings.spelling()} {measured_by(op, default_device()) if op else 'tune'}", err=True)
        return
    where = _devices(ledger, found)
    rows = []
    for d in found:
        when, state = d.created_at[:16].replace("T", " "), state_style(d.state)(d.state)
        rows.append([str(d.id), when, state, d.arm.candidate, against_baseline(d)])
    text = table(("id", "when (UTC)", "state", "serves", "vs baseline"), rows, right=(0,)).splitlines()
    click.echo(text[0])
    for line, decision in zip(text[1:], found, strict=True):
        low, high = decision.length_range or (0, 0)
        lengths = f" for contexts {low}..{high}" if decision.length_range else ""
        about = f"{decision.bucket}{lengths}{where[decision.hw_id]}"
        standing = decision.standing
        layout = standing.prepared.told if standing is not None and standing.prepared is not None else ""
        told = "; ".join(filter(None, (decision.reason, layout, contended(decision))))
        click.echo(f"{line}\n      {about}\n{paragraph(told, indent='      ')}")


def _devices(ledger: Ledger, found: Sequence[Decision]) -> dict[str, str]:
    """Return ` on NVIDIA H200` by hw_id; empty texts if all decisions are of one device."""
    first = {d.hw_id: d.id for d in reversed(found)}
    if len(first) == 1:
        return dict.fromkeys(first, "")
    known = {hw_id: ledger.evidence(number).fingerprint for hw_id, number in first.items()}
    return {hw_id: f" on {fp.name if fp else hw_id[:12]}" for hw_id, fp in known.items()}
