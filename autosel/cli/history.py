"""`history`: every decision ever made, newest first. Nothing in it is ever edited."""

from __future__ import annotations

import click

from autosel import settings
from autosel.cli.best import measured_by
from autosel.cli.figures import against_baseline, decision_json
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json, paragraph, state_style, table
from autosel.values import Decision


@verb("history", "history", "history attn -n 5 --json")
@click.argument("op", required=False)
@click.option("-n", "limit", type=click.IntRange(1), default=30, show_default=True, metavar="N", help="how many")
@json_option
def history_command(op: str | None, limit: int, as_json: bool) -> None:
    """Decisions about OP (or all), newest first, with their reasons."""
    from autosel.ledger.store import open_ledger

    name = None
    if op is not None:
        from autosel.candidates.registry import ledger_name

        name = ledger_name(op)
    with open_ledger() as ledger:
        found = ledger.history(name, limit=limit)
    if as_json:
        emit_json([{**decision_json(d), "state": d.state} for d in found])
        return
    if not found:
        click.echo(f"no decisions{f' about {op}' if op else ''} yet: the baseline serves")
        click.echo(f"measure:  {settings.spelling()} {measured_by(op) if op else 'tune'}", err=True)
        return
    rows = [
        [
            str(d.id),
            d.created_at[:16].replace("T", " "),
            state_style(d.state)(d.state),
            d.arm.candidate,
            against_baseline(d),
        ]
        for d in found
    ]
    text = table(("id", "when (UTC)", "state", "serves", "vs baseline"), rows, right=(0,)).splitlines()
    click.echo(text[0])
    for line, decision in zip(text[1:], found, strict=True):
        click.echo(
            f"{line}\n      {decision.bucket}{_lengths(decision)}\n{paragraph(decision.reason, indent='      ')}"
        )


def _lengths(decision: Decision) -> str:
    return (
        "" if decision.length_range is None else f" for contexts {decision.length_range[0]}..{decision.length_range[1]}"
    )
