"""`history`: every decision ever made, newest first. Nothing in it is ever edited."""

from __future__ import annotations

import click

from autosel.cli.figures import against_baseline, decision_json
from autosel.cli.output import emit_json, json_option, state_style, table


@click.command("history")
@click.argument("op", required=False)
@click.option("-n", "limit", type=click.IntRange(1), default=30, show_default=True, help="how many")
@json_option
def history_command(op: str | None, limit: int, as_json: bool) -> None:
    """Decisions about OP (or all), newest first, with their reasons.

    \b
    Examples:
      history
      history attn -n 5 --json
    """
    from autosel.ledger.store import open_ledger

    name = None
    if op is not None:
        from autosel.candidates.registry import op_name

        name = op_name(op)
    with open_ledger() as ledger:
        found = ledger.history(name, limit=limit)
    if as_json:
        emit_json([{**decision_json(d), "state": d.state} for d in found])
        return
    if not found:
        click.echo("no decisions yet")
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
        click.echo(line)
        click.echo(f"      {decision.workload.key}")
        click.echo(f"      {decision.reason}")
