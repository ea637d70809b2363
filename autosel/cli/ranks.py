"""`doctor --ranks`: show the decisions that each rank of a distributed job would serve, and which ranks differ."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from autosel import dispatch, settings
from autosel.cli.output import emit_json, paragraph, table
from autosel.errors import UsageError

if TYPE_CHECKING:
    from autosel.dispatch.agreement import Agreement

WAIT = timedelta(seconds=60)  # for the slowest rank to start


def show_ranks(as_json: bool) -> int:
    """Compare the ranks; rank 0 prints. Return the exit code, which is the same on every rank.

    Raises UsageError outside a job.
    """
    from torch import distributed

    from autosel.dispatch.agreement import compare, gathered, standing

    try:
        distributed.init_process_group("gloo", timeout=WAIT)
    except (ValueError, RuntimeError) as error:
        todo = f"torchrun --nproc-per-node 4 -m autosel doctor --ranks   ({settings.spelling()} alone is one process)"
        raise UsageError("--ranks needs a distributed job", why=str(error).splitlines()[0], todo=todo) from error
    try:
        found = compare(gathered(standing(dispatch.board())))
        if distributed.get_rank() == 0:
            _show(found, as_json)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return 1 if found.differences else 0


def _show(found: Agreement, as_json: bool) -> None:
    from autosel.dispatch.agreement import short

    if as_json:
        emit_json({"agree": not found.differences, "differences": found.differences, "ranks": found.standings})
        return
    rows = [[str(n), s.host, short(s.device), s.mode, short(s.snapshot)] for n, s in enumerate(found.standings)]
    click.echo(table(("rank", "host", "device", "mode", "snapshot"), rows, right=(0,)))
    for line in found.differences:
        click.echo(paragraph(line, hang="  "))
    if not found.differences:
        hosts = len({s.host for s in found.standings})
        click.echo(f"all {len(rows)} ranks on {hosts} host{'s' if hosts > 1 else ''} serve the same decisions")
