"""Command `decide`: promote, demote, pin or release by hand, with a reason in the history."""

from __future__ import annotations

import click

from autosel import ledger as ledgers
from autosel import settings
from autosel.cli import completion
from autosel.cli.best import decided
from autosel.cli.device import device_option
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json
from autosel.errors import UsageError
from autosel.ledger.describe import decision_json

EXAMPLES = (
    'decide attn --demote --reason "wrong token in request 7"',
    'decide 41 --promote cpp:attn_decode --reason "faster in production"',
    'decide 41 --pin --reason "frozen for the release"',
    'decide 41 --release --reason "release is out"',
)


@verb("decide", *EXAMPLES)
@click.argument("what", metavar="OP|KEY|N", shell_complete=completion.ops)
@click.option("--promote", metavar="CANDIDATE", help="serve this candidate; it must have passed parity there")
@click.option("--demote", is_flag=True, help="stop serving; within a second the baseline serves in every process")
@click.option(
    "--pin",
    is_flag=False,
    flag_value="",
    metavar="[CANDIDATE]",
    help="serve what serves now, or CANDIDATE, also after later races",
)
@click.option("--release", is_flag=True, help="remove the pin")
@click.option("--reason", required=True, help="the reason, kept with the decision")
@device_option()
@json_option
def decide_command(
    what: str,
    promote: str | None,
    demote: bool,
    pin: str | None,
    release: bool,
    reason: str,
    device: str,
    as_json: bool,
) -> None:
    """Change a decision by hand. Name it by its number (`explain` shows it), its op or its workload's key."""
    from autosel.ledger.commands import Demote, Pin, Promote, Unpin

    wanted = ((Promote, promote), (Demote, "" if demote else None), (Pin, pin), (Unpin, "" if release else None))
    chosen = [(kind, candidate) for kind, candidate in wanted if candidate is not None]
    if len(chosen) != 1:
        raise UsageError(f"decide what about {what}?", todo="name one of --promote, --demote, --pin and --release")
    [(kind, candidate)] = chosen
    command = kind(decision_id=_number(what, device), candidate=candidate or None, reason=reason)
    with ledgers.open_ledger() as ledger:
        made = ledger.write(command)
    if as_json:
        emit_json(decision_json(made))
    else:
        click.echo(f"decision {made.id}: {made.state} {made.arm.candidate} for {made.bucket}")


def _number(what: str, device: str) -> int:
    """Return the number of the decision that `what` names. Raises UsageError if it names several."""
    if what.isdecimal() and len(what) < 100:
        return int(what)
    op, key, _ = what.partition("/")
    known = [now.decision for now in decided(op, device)]
    found = [d for d in known if not key or what in (d.workload.key, d.bucket)]
    if len(found) != 1:
        raise UsageError(
            f"{what} names {len(found)} decisions",
            why="\n".join(f"{d.id}: {d.workload.key}, {d.mode}" for d in found or known),
            todo=f"name one by its number: {settings.spelling()} decide {(found or known)[0].id} ...",
        )
    return found[0].id
