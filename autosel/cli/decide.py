"""Commands `promote`, `demote` and `pin`: decisions by a person, each with a reason in the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autosel.cli.figures import decision_json
from autosel.cli.options import json_option, reason_option, verb
from autosel.cli.output import emit_json

if TYPE_CHECKING:
    from autosel.ledger.commands import Command
    from autosel.values import Decision


@verb("promote", 'promote 41 cpp:attn_decode --reason "measured on the production trace"')
@click.argument("decision_id", type=int)
@click.argument("candidate")
@reason_option
@json_option
def promote_command(decision_id: int, candidate: str, reason: str, as_json: bool) -> None:
    """Serve CANDIDATE instead of DECISION_ID's. CANDIDATE must have passed parity there."""
    from autosel.ledger.commands import Promote

    _write(Promote(decision_id=decision_id, candidate=candidate, reason=reason), as_json)


@verb("demote", 'demote 41 --reason "wrong token in request 7"')
@click.argument("decision_id", type=int)
@reason_option
@json_option
def demote_command(decision_id: int, reason: str, as_json: bool) -> None:
    """Stop serving DECISION_ID. The baseline serves within a second, in every process."""
    from autosel.ledger.commands import Demote

    _write(Demote(decision_id=decision_id, reason=reason), as_json)


@verb("pin", 'pin 41 --reason "frozen for the release"', 'pin 41 --off --reason "release is out"')
@click.argument("decision_id", type=int)
@click.argument("candidate", required=False)
@click.option("--off", is_flag=True, help="remove the pin")
@reason_option
@json_option
def pin_command(decision_id: int, candidate: str | None, off: bool, reason: str, as_json: bool) -> None:
    """Serve DECISION_ID's candidate (or CANDIDATE) until it is unpinned, also after later races."""
    from autosel.ledger.commands import Pin, Unpin

    kind = Unpin if off else Pin
    _write(kind(decision_id=decision_id, reason=reason, candidate=None if off else candidate), as_json)


def _write(command: Command[Decision], as_json: bool) -> None:
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        decision = ledger.write(command)
    if as_json:
        emit_json(decision_json(decision))
    else:
        click.echo(f"decision {decision.id}: {decision.state} {decision.arm.candidate} for {decision.bucket}")
