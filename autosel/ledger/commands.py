"""All commands that change a ledger, and their JSON form, in which another process sends them to the ledger's owner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from autosel.ledger.decide import Demote, Pin, Promote, Record, Renew, Unpin
from autosel.ledger.evidence import SaveAA, SaveParity, Spend
from autosel.ledger.faults import plain
from autosel.ledger.measuring import CloseTrial, Hold, OpenTrial, Release, TakeOver
from autosel.ledger.transaction import Command, R
from autosel.ledger.transfer import Adopt, Import
from autosel.values import from_json, to_json

__all__ = [
    "Adopt",
    "CloseTrial",
    "Command",
    "Demote",
    "Hold",
    "Import",
    "OpenTrial",
    "Pin",
    "Promote",
    "Record",
    "Release",
    "Renew",
    "SaveAA",
    "SaveParity",
    "Spend",
    "TakeOver",
    "Unpin",
]
ADDRESS = "/v1/ledger"
MOST_BYTES = 64 << 20  # a race contains every sample
_ALL: tuple[type[Command[Any]], ...] = (
    *(Record, Demote, Promote, Pin, Unpin, Renew),
    *(SaveParity, Spend, SaveAA),
    *(TakeOver, OpenTrial, CloseTrial, Hold, Release),
    *(Import, Adopt),
)
BY_CALL: Mapping[str, type[Command[Any]]] = {kind.call: kind for kind in _ALL}


def encode(command: Command[Any], leases: Mapping[str, int]) -> dict[str, Any]:
    """Encode the command, and the sender's leases on devices."""
    return {"command": {"call": command.call, **plain(to_json(command))}, "leases": dict(leases)}


def decode(body: Any) -> tuple[Command[Any], dict[str, int]]:
    """Decode a command. Raises ValueError, naming the field, for anything else."""
    if not isinstance(body, dict) or set(body) != {"command", "leases"} or not isinstance(body["command"], dict):
        raise ValueError("expected {command, leases}")
    call, fields = body["command"].get("call"), {n: v for n, v in body["command"].items() if n != "call"}
    kind = BY_CALL.get(str(call))
    if kind is None:
        raise ValueError(f"call: one of {', '.join(BY_CALL)} is expected")
    return from_json(kind, fields), from_json(Mapping[str, int], body["leases"])


def result_of(command: Command[R], answer: Any) -> R:
    """Decode the JSON of a command's result. Raises ValueError."""
    made: R = from_json(_result(command.call), answer)
    return made


@cache
def _result(call: str) -> Any:
    return get_type_hints(BY_CALL[call].run)["return"]
