"""Command `fingerprint`: show identity and measured rates, each with its unit, spread and source."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from autosel import fingerprint
from autosel.cli import completion
from autosel.cli.device import default_device
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json, note_lines, paragraph, table
from autosel.errors import UnknownName
from autosel.fingerprint.describe import describe, headline, rate_label
from autosel.values import Fingerprint, to_json


@verb("fingerprint", "fingerprint", "fingerprint --refresh --json", "fingerprint h200")
@click.argument("device", default=default_device, shell_complete=completion.devices)
@click.option("--refresh", is_flag=True, help="measure the rates again instead of reusing them")
@json_option
def fingerprint_command(device: str, refresh: bool, as_json: bool) -> None:
    """Show the identity and measured rates of DEVICE: cpu, cuda, cuda:1. The default is the GPU if there is one.

    The name of a known device shows the rates of its file.
    """
    fp = find(device, refresh)
    if as_json:
        emit_json({**to_json(fp), "hw_id": fp.hw_id, "env_id": fp.env_id})
    else:
        show(fp)


def find(device: str, refresh: bool = False) -> Fingerprint:
    """Return a device of this machine, or a known device, which may be absent. Raises UnknownName, UsageError."""
    try:
        return fingerprint.take(device, refresh=refresh)
    except UnknownName as error:
        if device in fingerprint.names():
            return fingerprint.load(device)
        raise UnknownName("device", device, (*error.known, *fingerprint.names())) from None


def show(fp: Fingerprint) -> None:
    labels = {rate_label(name) for name in fp.rates}
    rows = [list(row) for row in describe(fp)]
    click.echo(f"{headline(fp)}\n")
    click.echo(table(("fact", "value"), [_fact(row) for row in rows if row[0] not in labels], wrap=1))
    rates = [row for row in rows if row[0] in labels]
    if rates:
        method, shown = _common(rates)
        click.echo()
        click.echo(table(("rate", "value", "spread", "source"), shown, right=(1, 2), wrap=3))
        if method:
            click.echo(f"measured with {method}")
    click.echo()
    for line in note_lines(fp.notes):
        click.echo(line)
    if fp.contended:
        why = "contended: other work ran, or the device was slowed; the best windows are shown, not an average"
        click.echo(paragraph(why, hang="  "))
    click.echo(f"hw_id {fp.hw_id[:16]}   env_id {fp.env_id[:16]}   ({fp.source})")


def _fact(row: Sequence[str]) -> list[str]:
    """Return a row with digests cut to 16 digits; --json shows all."""
    return [row[0], row[1][:16] if re.fullmatch(r"[0-9a-f]{64}", row[1]) else row[1]]


def _common(rates: Sequence[Sequence[str]]) -> tuple[str, list[Sequence[str]]]:
    """Return the common ending of all sources (`cpu/probes.cpp avx512bf16`), and the rates without it."""
    endings = {row[3].rpartition(", ")[2] for row in rates}
    if len(endings) != 1 or not all(", " in row[3] for row in rates):
        return "", list(rates)
    return endings.pop(), [[*row[:3], row[3].rpartition(", ")[0]] for row in rates]
