"""`promote`, `demote`, `pin`: decisions by hand, each with a reason that stays in the history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from autosel.cli.figures import decision_json
from autosel.cli.output import emit_json, json_option
from autosel.ledger.store import Ledger, open_ledger
from autosel.values import Decision

reason_option = click.option("--reason", required=True, help="why; it is kept with the decision")


@contextmanager
def _deciding() -> Iterator[Ledger]:
    with open_ledger() as ledger:
        yield ledger


def _said(decision: Decision, as_json: bool) -> None:
    if as_json:
        emit_json(decision_json(decision))
    else:
        click.echo(f"decision {decision.id}: {decision.state} {decision.arm.candidate} for {decision.bucket}")


@click.command("promote")
@click.argument("decision_id", type=int)
@click.argument("candidate")
@reason_option
@json_option
def promote_command(decision_id: int, candidate: str, reason: str, as_json: bool) -> None:
    """Serve CANDIDATE where DECISION_ID serves. It must have passed parity there.

    \b
    Example:
      promote 41 cpp:attn_decode --reason "measured on the production trace"
    """
    with _deciding() as ledger:
        _said(ledger.promote(decision_id, candidate, reason), as_json)


@click.command("demote")
@click.argument("decision_id", type=int)
@reason_option
@json_option
def demote_command(decision_id: int, reason: str, as_json: bool) -> None:
    """Stop serving DECISION_ID; the baseline serves from now on, in every process, within a second.

    \b
    Example:
      demote 41 --reason "wrong token in request 7"
    """
    with _deciding() as ledger:
        _said(ledger.demote(decision_id, reason), as_json)


@click.command("pin")
@click.argument("decision_id", type=int)
@click.argument("candidate", required=False)
@click.option("--off", is_flag=True, help="take the pin away")
@reason_option
@json_option
def pin_command(decision_id: int, candidate: str | None, off: bool, reason: str, as_json: bool) -> None:
    """Serve DECISION_ID's candidate (or CANDIDATE) whatever later races say, until unpinned.

    \b
    Examples:
      pin 41 --reason "frozen for the release"
      pin 41 --off --reason "release is out"
    """
    with _deciding() as ledger:
        made = ledger.unpin(decision_id, reason) if off else ledger.pin(decision_id, reason, candidate)
        _said(made, as_json)
