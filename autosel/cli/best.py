"""`best`: what serves an op on this device now, with its figures."""

from __future__ import annotations

import click

from autosel import settings
from autosel.cli.figures import decision_json, decision_table
from autosel.cli.output import emit_json, json_option
from autosel.errors import LedgerError
from autosel.values import Decision


@click.command("best")
@click.argument("op")
@click.option("--workload", default="", help="only workloads whose key contains this text, as D128.L8192")
@json_option
def best_command(op: str, workload: str, as_json: bool) -> None:
    """What serves OP here. --json: one object, for the longest context if there are several; `all` lists the rest.

    \b
    Examples:
      best attn
      best gemv --json
      best attn --workload L8192
    """
    rows = [d for d in serving(op) if workload in d.workload.key]
    if not rows:
        raise LedgerError(
            f"no decision for {op}" + (f" with {workload!r} in its key" if workload else "") + " on this device",
            why="the baseline serves it",
            todo=f"{settings.spelling()} tune --op {op}",
        )
    if as_json:
        first = max(rows, key=lambda d: (dict(d.workload.dims).get("L", 0), d.workload.key))
        emit_json({**decision_json(first), "all": [decision_json(d) for d in rows]})
        return
    click.echo(decision_table(rows, {}))


def serving(op: str | None) -> list[Decision]:
    """What serves here now, in the ledger's order; gemv and gemm are linear at M = 1 and above."""
    from autosel.candidates.registry import op_name
    from autosel.ledger.store import open_ledger

    hw_id = this_device()
    name = op_name(op) if op else None
    with open_ledger() as ledger:
        rows = [s.decision for s in ledger.serving() if s.decision.hw_id == hw_id]
    rows = [d for d in rows if name in (None, d.op)]
    if op in ("gemv", "gemm"):
        rows = [d for d in rows if (d.workload["M"] == 1) == (op == "gemv")]
    return rows


def this_device() -> str:
    """This machine's hw_id, without measuring anything."""
    from autosel.fingerprint import machine
    from autosel.values import digest

    return digest({"kind": "cpu", **machine.identity()})
