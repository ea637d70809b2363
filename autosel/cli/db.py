"""`db`: the ledger's file."""

from __future__ import annotations

from pathlib import Path

import click

from autosel.cli.output import bytes_text, emit_json, json_option


@click.group("db")
def db_command() -> None:
    """The ledger: where it is, whether it is whole, a copy of it.

    \b
    Examples:
      db info
      db check
      db backup /backups/ledger.db
    """


@db_command.command("info")
@json_option
def info(as_json: bool) -> None:
    """Where the ledger is and what it holds."""
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        path = Path(ledger.name)
        facts = {
            "ledger": ledger.name,
            "bytes": path.stat().st_size if path.is_file() else None,
            "decisions": len(ledger.history()),
            "serving": len(ledger.serving()),
            "writable": ledger.writable,
        }
    if as_json:
        emit_json(facts)
        return
    size = f", {bytes_text(float(facts['bytes']))}" if isinstance(facts["bytes"], int) else ""
    click.echo(f"{facts['ledger']}{size}{'' if facts['writable'] else ', read-only'}")
    click.echo(f"{facts['decisions']} decisions, {facts['serving']} of them serve")


@db_command.command("check")
def check() -> None:
    """Look at every page, index and reference."""
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        ledger.check()
    click.echo("the ledger is whole")


@db_command.command("upgrade")
def upgrade() -> None:
    """Bring the schema to this version (done by itself whenever the ledger is opened)."""
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        click.echo(f"{ledger.name} is up to date")


@db_command.command("backup")
@click.argument("path", type=click.Path(path_type=Path))
def backup(path: Path) -> None:
    """A consistent copy at PATH, made while the ledger is in use."""
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        ledger.backup(path)
    click.echo(f"copied to {path}")
