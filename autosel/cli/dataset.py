"""`export --to flashinfer` and `import --definition`: decisions as a dataset, a solution as a source to race."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from autosel import settings
from autosel.cli.output import emit_json
from autosel.errors import UsageError


def export_dataset(folder: Path) -> None:
    """What serves now, as a flashinfer-bench dataset."""
    from autosel.integrations import flashinfer_bench
    from autosel.integrations.engines import flashinfer
    from autosel.ledger.store import open_ledger

    if str(folder) == "-":
        raise UsageError("--to writes a folder", todo=f"{settings.spelling()} export --to flashinfer dataset/")
    with open_ledger() as ledger:
        evidence = [ledger.evidence(s.decision.id) for s in ledger.serving()]
    decided = [
        flashinfer_bench.Decided(
            decision=e.decision, device=e.fingerprint, parity=flashinfer_bench.proof_of(e.parities, e.decision.arm)
        )
        for e in evidence
    ]
    made = flashinfer.export(decided, folder)
    counts = f"{made.definitions} definitions, {made.solutions} solutions, {made.traces} traces"
    click.echo(f"{counts} in {folder}", err=True)
    for line in made.left:
        click.echo(f"  left out: {line}", err=True)


def import_solution(path: Path | None, definition: Path | None, into: Path | None, as_json: bool) -> None:
    """Unpack it, and say how to race it."""
    from autosel.integrations import flashinfer_bench

    if path is None or definition is None or into is None:
        raise UsageError(
            "a solution needs its --definition, and a folder --into",
            why="it says what it solves by name only",
            todo=f"{settings.spelling()} import solution.json --definition definition.json --into mine/",
        )
    found = flashinfer_bench.unpack(path, definition, into)
    if as_json:
        emit_json({"op": found.op, "candidate": found.target})
        return
    click.echo("unpacked; nothing of it has run. Prove and time it:")
    click.echo(f"  {settings.spelling()} race {found.op} --candidate {shlex.quote(found.target)}")
