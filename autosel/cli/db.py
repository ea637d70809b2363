"""Command `db`: inspect, check, back up and restore the ledger."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from autosel import fingerprint, settings
from autosel import ledger as ledgers
from autosel.cli.device import here
from autosel.cli.options import PATH, Known, VerbGroup, json_option
from autosel.cli.output import emit_json
from autosel.errors import UsageError
from autosel.ledger.describe import bytes_text

EXAMPLES = (
    "db info",
    "db check",
    "db backup /backups/ledger.db",
    "db restore /backups/ledger.db",
    "db grant tuner node7",
)


@click.group("db", cls=VerbGroup, examples=EXAMPLES)
def db_command() -> None:
    """Show, check, copy and restore the ledger."""


@db_command.command("info", examples=("db info", "db info --json"))
@json_option
def info(as_json: bool) -> None:
    """Show the ledger's place, size and number of decisions."""
    with ledgers.open_ledger() as ledger:
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


@db_command.command("check", examples=("db check",))
@json_option
def check(as_json: bool) -> None:
    """Check every page, index and reference."""
    with ledgers.open_ledger() as ledger:
        ledger.check()
        _say(f"{ledger.name} is intact", {"ledger": ledger.name, "whole": True}, as_json)


@db_command.command("upgrade", examples=("db upgrade",))
@json_option
def upgrade(as_json: bool) -> None:
    """Upgrade the schema to this version, as opening the ledger does."""
    from autosel.ledger.schema import HEAD

    with ledgers.open_ledger() as ledger:
        _say(f"{ledger.name} is up to date", {"ledger": ledger.name, "schema": HEAD}, as_json)


@db_command.command("backup", examples=("db backup /backups/ledger.db",))
@click.argument("path", type=PATH)
@json_option
def backup(path: Path, as_json: bool) -> None:
    """Write a consistent copy to PATH while the ledger is in use."""
    with ledgers.open_ledger() as ledger:
        ledger.backup(path.absolute())
        _say(f"copied to {path}", {"ledger": ledger.name, "backup": str(path.absolute())}, as_json)


@db_command.command("restore", examples=("db restore /backups/ledger.db",))
@click.argument("path", type=PATH)
@json_option
def restore(path: Path, as_json: bool) -> None:
    """Replace the ledger by a backup, and keep the old ledger."""
    from autosel.ledger.engine import Database
    from autosel.ledger.locks import device_lock
    from autosel.ledger.restore import restore as put_back

    target = Database(settings.db_url()).path
    if target is None:
        raise UsageError("the ledger is on a server", todo="restore it with the server's own tools")
    with ExitStack() as locks:
        for place, fp in here():  # fails while a tune runs
            locks.enter_context(device_lock(settings.home(), fp.hw_id, fingerprint.unit(place)))
        aside = put_back(path.absolute(), target)
        with ledgers.open_ledger() as ledger:  # publishes its serving decisions
            text = f"{target} is now the backup, {len(ledger.history())} decisions"
    text += f"; the old one is {aside}" if aside else ""
    _say(text, {"ledger": str(target), "replaced": str(aside) if aside else None}, as_json)


@db_command.command("grant", examples=("db grant tuner node7", "db grant reader dashboard --print"))
@click.argument("role", type=Known("role", ("reader", "tuner", "admin")))
@click.argument("login")
@click.option("--print", "only_print", is_flag=True, help="print the SQL, change nothing")
@json_option
def grant(role: str, login: str, only_print: bool, as_json: bool) -> None:
    """Set the permissions of LOGIN in the shared ledger.

    reader: read everything. tuner: also record decisions, proofs and races; every serving host needs it. admin: also
    end quarantines. No role can change history; they only append.
    """
    with ledgers.open_ledger(alone=True) as ledger:
        made = ledger.grant(role, login, only_say=only_print)
    if as_json:
        emit_json({"ledger": ledger.name, "role": role, "login": login, "granted": not only_print, "sql": made})
    elif only_print:
        click.echo("".join(f"{line};\n" for line in made), nl=False)
    else:
        click.echo(f"{login} is a {role} of {ledger.name}")


@db_command.command("release", examples=('db release 3 --reason "the driver was at fault"', "db release 3 4 5"))
@click.argument("quarantine_ids", metavar="N [N]", type=int, nargs=-1, required=True)
@click.option("--reason", default="released by hand", show_default=True, help="the reason, kept with the quarantine")
@json_option
def release(quarantine_ids: tuple[int, ...], reason: str, as_json: bool) -> None:
    """End quarantines (doctor lists them): their builds may race again.

    The next tune proves and races them; it needs no --force.
    """
    from autosel.ledger.commands import Release

    with ledgers.open_ledger() as ledger:
        for number in quarantine_ids:
            ledger.write(Release(quarantine_id=number, reason=reason))
    numbers = ", ".join(map(str, quarantine_ids))
    ended = f"quarantine {numbers} has ended" if len(quarantine_ids) == 1 else f"quarantines {numbers} have ended"
    _say(f"{ended}; `{settings.spelling()} tune` races again", {"released": quarantine_ids, "reason": reason}, as_json)


def _say(text: str, document: dict[str, object], as_json: bool) -> None:
    if as_json:
        emit_json(document)
    else:
        click.echo(text)
