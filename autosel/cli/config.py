"""Show every setting, its value and its source (`doctor --settings`)."""

from __future__ import annotations

import click

from autosel import settings
from autosel.cli.output import emit_json, paragraph, table


def show_settings(as_json: bool) -> None:
    values = settings.read()
    if as_json:
        emit_json({n: {"value": _plain(v.value), "origin": v.origin} for n, v in values.items()})
        return
    rows = [[s.variable, _text(values[s.name].value), values[s.name].origin] for s in settings.SETTINGS]
    click.echo(table(("setting", "value", "from"), rows))
    click.echo()
    click.echo(table(("setting", "what it does"), [[s.variable, s.help] for s in settings.SETTINGS], wrap=1))
    file = settings.home() / "config.toml"
    told = f"settings file: {file} (the same names in lower case, without AUTOSEL_; the environment takes precedence)"
    click.echo("\n" + paragraph(told, hang="  "))
    for name in settings.unknown_variables():
        click.echo(f"note: {name} is not a setting of autosel", err=True)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:g}"
    return str(value or "-")


def _plain(value: object) -> str | int | float | bool | None:
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
