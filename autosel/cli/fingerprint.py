"""`fingerprint`: identity and measured rates, each with its unit, spread and source."""

from __future__ import annotations

import click

from autosel.cli.output import emit_json, json_option, table
from autosel.values import Fingerprint, to_json


@click.command("fingerprint")
@click.argument("device", default="cpu")
@click.option("--refresh", is_flag=True, help="measure the rates again instead of reusing them")
@json_option
def fingerprint_command(device: str, refresh: bool, as_json: bool) -> None:
    """Who this DEVICE is, and how fast it was measured to be. A known device's name shows what its file holds.

    \b
    Examples:
      fingerprint
      fingerprint --refresh --json
      fingerprint h200
    """
    fp = find(device, refresh)
    if as_json:
        emit_json({**to_json(fp), "hw_id": fp.hw_id, "env_id": fp.env_id})
        return
    show(fp)


def find(device: str, refresh: bool = False) -> Fingerprint:
    """This machine's `cpu`, or a known device that need not be here."""
    from autosel import fingerprint
    from autosel.errors import UnknownName
    from autosel.fingerprint import known

    try:
        return fingerprint.take(device, refresh=refresh)
    except UnknownName as error:
        if device in known.names():
            return known.load(device)
        raise UnknownName("device", device, (*error.known, *known.names())) from None


def show(fp: Fingerprint) -> None:
    from autosel.fingerprint.describe import describe, headline

    click.echo(headline(fp))
    click.echo()
    rows = [list(row) for row in describe(fp)]
    facts = [row[:2] for row in rows if not row[2] and not _is_rate(fp, row)]
    rates = [row[:3] for row in rows if row[2] or _is_rate(fp, row)]
    click.echo(_wrapped(facts))
    if rates:
        click.echo()
        click.echo(table(("rate", "value", "spread"), rates, right=(1, 2)))
        for source in dict.fromkeys(row[3] for row in rows if row[3] and row[:3] in rates):
            click.echo(f"  {source}")
    click.echo()
    for note in fp.notes:
        click.echo(f"note: {note}")
    if fp.contended:
        click.echo("contended: other work disturbed the measurement; the best windows are shown, not an average")
    click.echo(f"hw_id {fp.hw_id[:16]}   env_id {fp.env_id[:16]}   ({fp.source})")


def _is_rate(fp: Fingerprint, row: list[str]) -> bool:
    from autosel.fingerprint.describe import rate_label

    return row[0] in {rate_label(name) for name in fp.rates}


def _wrapped(facts: list[list[str]]) -> str:
    """Two columns; a long value (the instruction sets) continues below itself."""
    import textwrap

    width = max(len(name) for name, _ in facts) + 2
    lines = []
    for name, value in facts:
        parts = textwrap.wrap(value, 79 - width, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"{name:<{width}}{parts[0]}")
        lines += [" " * width + part for part in parts[1:]]
    return "\n".join(lines)
