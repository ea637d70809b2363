"""`export --to flashinfer`; `import` of a solution as a source to race, and of traces as evidence and traffic."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autosel import ledger as ledgers
from autosel import settings
from autosel.cli.device import default_device, identity
from autosel.cli.output import emit_json, table
from autosel.errors import BadConfig, UsageError
from autosel.files import is_folder
from autosel.ledger.describe import microseconds, ratio
from autosel.ledger.key import current_mode
from autosel.values import SERVING, Decision, to_json

if TYPE_CHECKING:
    from autosel.integrations.flashinfer_traces import Elsewhere, Traces


def export_dataset(folder: Path) -> None:
    """Write what serves now as a flashinfer-bench dataset."""
    from autosel.integrations import flashinfer_bench
    from autosel.integrations.engines import flashinfer

    with ledgers.open_ledger() as ledger:
        evidence = [ledger.evidence(s.decision.id) for s in ledger.serving() if s.decision.state in SERVING]
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
    """Unpack a solution and print the command that races it."""
    from autosel.integrations import flashinfer_bench

    if path is None or definition is None or into is None:
        raise UsageError(
            "a solution needs --definition and --into",
            why="a solution contains only the name of its definition",
            todo=f"{settings.spelling()} import solution.json --definition definition.json --into mine/",
        )
    found = flashinfer_bench.unpack(path, definition, into)
    if as_json:
        emit_json({"op": found.op, "candidate": found.target})
        return
    click.echo("unpacked, not run. Prove and time it:")
    click.echo(f"  {settings.spelling()} race {found.op} --candidate {shlex.quote(found.target)}")


SHOWN = 12  # rows of the table; the home keeps them all


def import_traces(dataset: Path, into: Path | None, as_json: bool) -> None:
    """Store a dataset's evidence, and write its workloads as a recording to `into`."""
    from autosel.dispatch import recorded
    from autosel.integrations import flashinfer_traces

    if into is not None and is_folder(into):
        raise UsageError(f"{into} is a folder", todo=f"name a file: --into {into / 'traffic.json'}")
    if into is not None and not is_folder(into.absolute().parent):
        raise BadConfig(f"cannot write {into}", why=f"folder {into.parent} does not exist")
    found = flashinfer_traces.read(dataset)
    added = flashinfer_traces.keep(settings.home(), found.evidence)
    if into is not None:
        try:
            recorded.save(into, flashinfer_traces.traffic(found, identity(default_device()).hw_id, current_mode()))
        except OSError as error:
            raise BadConfig(f"cannot write {into}", why=error.strerror or str(error)) from error
    if as_json:
        calls = [{"workload": to_json(w), "calls": n} for w, n in found.calls.items()]
        evidence = [{**to_json(e), "bucket": e.workload.bucket, "speedup": e.speedup} for e in found.evidence]
        emit_json({"evidence": evidence, "added": added, "workloads": calls, "left": list(found.left)})
        return
    for line in _told(found, added, into):
        click.echo(line)


def _told(found: Traces, added: int, into: Path | None) -> Iterator[str]:
    shown = sorted(found.evidence, key=lambda e: (e.workload.op, -(e.speedup or 0.0)))[:SHOWN]
    rows = [[e.workload.key, e.solution, *_times(e), e.hardware] for e in shown]
    if rows:
        yield table(("workload", "solution", "us", "speedup", "measured on"), rows, right=(2, 3), wrap=1)
    if len(found.evidence) > SHOWN:
        yield f"... and {len(found.evidence) - SHOWN} more"
    yield f"{len(found.evidence)} evaluations of other machines, {added} of them new; they do not affect decisions"
    for line in found.left:
        yield f"  left out: {line}"
    if into is None:
        yield f"tune their {len(found.calls)} workloads: add --into traffic.json"
    else:
        yield f"{len(found.calls)} workloads in {into}: {settings.spelling()} tune --recorded {shlex.quote(str(into))}"


def _times(e: Elsewhere) -> tuple[str, str]:
    if e.time_us is None:
        return "", e.status
    return microseconds(e.time_us), ratio(e.speedup) if e.speedup else ""


def elsewhere(d: Decision) -> list[Elsewhere]:
    """Return the imported evaluations of a decision's bucket."""
    from autosel.integrations import flashinfer_traces

    return flashinfer_traces.kept(settings.home(), d.bucket)


def elsewhere_lines(d: Decision) -> list[tuple[str, str]]:
    """Return the line of `explain` for imported evaluations, with their origin."""
    found = elsewhere(d)
    if not found:
        return []
    best = found[0]
    what = f"{ratio(best.speedup)} over its reference" if best.speedup else best.status
    more = f"; {len(found) - 1} more" if len(found) > 1 else ""
    text = f"{best.solution}, {what}, on {best.hardware} ({best.origin}){more}"
    return [("elsewhere", f"{text}; not measured here, does not affect decisions")]
