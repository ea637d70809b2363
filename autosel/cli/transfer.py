"""`export` and `import`: decisions as one file; `export --repro`: one decision's race as a script."""

from __future__ import annotations

from pathlib import Path

import click

from autosel import settings
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json
from autosel.errors import BadConfig


@verb("export", "export decisions.json", "export --repro 41 race41.py")
@click.argument("path", type=click.Path(path_type=Path, allow_dash=True), default="-")
@click.option("--repro", "decision_id", type=int, help="write a script that reproduces this decision's race")
def export_command(path: Path, decision_id: int | None) -> None:
    """What serves now, as one file in the snapshot's format (PATH, default stdout)."""
    from autosel.ledger.store import open_ledger

    if not path.parent.is_dir():
        raise BadConfig(
            f"cannot write {path}", why=f"there is no folder {path.parent}", todo="make it, or check the path"
        )

    with open_ledger() as ledger:
        if decision_id is not None:
            from autosel.cli.repro import script

            text = script(ledger.evidence(decision_id))
            if str(path) == "-":
                click.echo(text, nl=False)
            else:
                _write(path, text)
                click.echo(f"{path}: run it with any Python that has torch and a C++ compiler", err=True)
            return
        if str(path) == "-":
            emit_json(ledger.export())
        else:
            made = ledger.export(path)
            click.echo(f"{len(made['rows'])} decisions written to {path}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error


@verb("import", "import decisions.json")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def import_command(path: Path, as_json: bool) -> None:
    """Take in an export. Decisions of this device serve; those of another are kept as history and never serve here."""
    from autosel.cli.best import this_device
    from autosel.ledger.store import open_ledger

    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadConfig(f"cannot read {path}", why=error.strerror or str(error), todo="check the path") from error
    with open_ledger() as ledger:
        found = ledger.import_(data, this_device())
    if as_json:
        kept = [{"id": d.id, "reason": why} for d, why in found.kept]
        emit_json({"served": [d.id for d in found.served], "kept": kept})
        return
    click.echo(f"{len(found.served)} decisions serve here now, {len(found.kept)} are kept as history")
    for decision, why in found.kept:
        click.echo(f"  {decision.workload.key}: {why}")
    if found.served:
        click.echo(f"look at them: {settings.spelling()} history")
