"""`config`: every setting, its value, and where the value came from."""

from __future__ import annotations

import click

from autosel import settings
from autosel.cli.output import emit_json, json_option, table


@click.command("config")
@json_option
def config_command(as_json: bool) -> None:
    """Every setting with its value and origin. Set them in the environment (AUTOSEL_NAME) or in config.toml.

    \b
    Example:
      AUTOSEL_EFFORT=full config
    """
    values = settings.read()
    if as_json:
        emit_json({n: {"value": _plain(v.value), "origin": v.origin} for n, v in values.items()})
        return
    rows = [[s.variable, str(_plain(values[s.name].value) or "-"), values[s.name].origin] for s in settings.SETTINGS]
    click.echo(table(("setting", "value", "from"), rows))
    click.echo()
    for setting in settings.SETTINGS:
        click.echo(f"{setting.variable}: {setting.help}")
    click.echo(f"\nsettings file: {settings.home() / 'config.toml'} (the same names in lower case, without AUTOSEL_)")


def _plain(value: object) -> str | int | float | bool | None:
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
