"""Define the commands that another process may send to a ledger: one frozen value per change, with its result.

A command travels as JSON and is decoded by the types of its fields, so it is data, never code. The process that owns
the ledger runs it; `remote.RemoteLedger` sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autosel.ledger.containment import Strike
from autosel.ledger.faults import plain
from autosel.ledger.host import Host
from autosel.ledger.key import LengthRange
from autosel.values import (
    Arm,
    Decision,
    Fingerprint,
    Parity,
    Race,
    State,
    Verdict,
    Workload,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    from autosel.ledger.store import Ledger

ADDRESS = "/v1/ledger"
MOST_BYTES = 64 << 20  # a race contains every sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    call: Literal["record"] = "record"
    fp: Fingerprint
    workload: Workload
    verdict: Verdict | None
    race: Race | None
    parities: tuple[tuple[Arm, Parity], ...]
    arm: Arm
    baseline: Arm
    mode: str
    state: State
    reason: str
    idempotency_key: str
    length_range: LengthRange
    entrants: tuple[str, ...]

    def run(self, ledger: Ledger) -> Decision:
        return ledger.record(
            self.fp,
            self.workload,
            verdict=self.verdict,
            race=self.race,
            parities=self.parities,
            arm=self.arm,
            baseline=self.baseline,
            mode=self.mode,
            state=self.state,
            reason=self.reason,
            idempotency_key=self.idempotency_key,
            length_range=self.length_range,
            entrants=self.entrants,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """Change a decision by hand: demote it, promote another arm of it, pin or unpin it."""

    call: Literal["demote", "promote", "pin", "unpin"]
    decision_id: int
    reason: str
    candidate: str | None = None

    def run(self, ledger: Ledger) -> Decision:
        if self.call == "promote":
            return ledger.promote(self.decision_id, self.candidate or "", self.reason)
        if self.call == "pin":
            return ledger.pin(self.decision_id, self.reason, self.candidate)
        return getattr(ledger, self.call)(self.decision_id, self.reason)  # type: ignore[no-any-return]  # a Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveParity:
    call: Literal["save_parity"] = "save_parity"
    hw_id: str
    workload: Workload
    arm: Arm
    parity: Parity

    def run(self, ledger: Ledger) -> int:
        return ledger.save_parity(self.hw_id, self.workload, self.arm, self.parity)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    call: Literal["take_over"] = "take_over"
    hw_id: str
    holder: str
    unit: str = ""

    def run(self, ledger: Ledger) -> tuple[int, list[Strike]]:
        return ledger.take_over(self.hw_id, self.holder, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTrial:
    call: Literal["open_trial"] = "open_trial"
    hw_id: str
    op: str
    arm: Arm

    def run(self, ledger: Ledger) -> int:
        return ledger.open_trial(self.hw_id, self.op, self.arm)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTrial:
    call: Literal["close_trial"] = "close_trial"
    trial_id: int
    outcome: str

    def run(self, ledger: Ledger) -> None:
        ledger.close_trial(self.trial_id, self.outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Quarantine a build."""

    call: Literal["quarantine"] = "quarantine"
    arm: Arm
    hw_id: str
    op: str
    cause: str
    reason: str
    digest: str
    driver: str
    evidence: Mapping[str, Any]

    def run(self, ledger: Ledger) -> int:
        return ledger.quarantine(
            self.arm,
            hw_id=self.hw_id,
            op=self.op,
            cause=self.cause,
            reason=self.reason,
            digest=self.digest,
            driver=self.driver,
            evidence=self.evidence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    call: Literal["release"] = "release"
    quarantine_id: int
    reason: str

    def run(self, ledger: Ledger) -> None:
        ledger.release(self.quarantine_id, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    call: Literal["spend"] = "spend"
    key: str
    amount: float
    reason: str

    def run(self, ledger: Ledger) -> bool:
        return ledger.spend(self.key, self.amount, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAA:
    call: Literal["save_aa"] = "save_aa"
    hw_id: str
    time_class: str
    crossings: tuple[bool, ...]

    def run(self, ledger: Ledger) -> None:
        ledger.save_aa(self.hw_id, self.time_class, self.crossings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Import `document`, an export as JSON; the result is the numbers of its decisions."""

    call: Literal["import"] = "import"
    document: Mapping[str, Any]
    hw_id: str
    origin: Host | None = None
    also: tuple[str, ...] = ()

    def run(self, ledger: Ledger) -> dict[str, Any]:
        found = ledger.import_(self.document, self.hw_id, self.origin, also=self.also)
        numbers = {"served": [d.id for d in found.served], "waiting": [d.id for d in found.waiting]}
        return {**numbers, "kept": [[d.id, why] for d, why in found.kept]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    call: Literal["adopt"] = "adopt"
    decision_id: int
    parity: Parity

    def run(self, ledger: Ledger) -> bool:
        return ledger.adopt(self.decision_id, self.parity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Renew a stale decision. `arm` and `baseline` are its arms now; `why` is the reason for its staleness."""

    call: Literal["renew"] = "renew"
    decision_id: int
    arm: Arm
    baseline: Arm
    parity: Parity
    why: str

    def run(self, ledger: Ledger) -> Decision | None:
        return ledger.renew(self.decision_id, arm=self.arm, baseline=self.baseline, parity=self.parity, why=self.why)


Command = (
    Record
    | ByHand
    | SaveParity
    | TakeOver
    | OpenTrial
    | CloseTrial
    | Hold
    | Release
    | Spend
    | SaveAA
    | Import
    | Adopt
    | Renew
)

_KINDS: Mapping[str, Any] = {
    "record": Record,
    "demote": ByHand,
    "promote": ByHand,
    "pin": ByHand,
    "unpin": ByHand,
    "save_parity": SaveParity,
    "take_over": TakeOver,
    "open_trial": OpenTrial,
    "close_trial": CloseTrial,
    "quarantine": Hold,
    "release": Release,
    "spend": Spend,
    "save_aa": SaveAA,
    "import": Import,
    "adopt": Adopt,
    "renew": Renew,
}


def encode(command: Command, leases: Mapping[str, int]) -> dict[str, Any]:
    """Encode the command, and the sender's leases on devices."""
    return {"command": plain(to_json(command)), "leases": dict(leases)}


def decode(body: Any) -> tuple[Command, dict[str, int]]:
    """Decode a command. Raises ValueError, naming the field, for anything else."""
    if not isinstance(body, dict) or set(body) != {"command", "leases"} or not isinstance(body["command"], dict):
        raise ValueError("expected {command, leases}")
    kind = _KINDS.get(str(body["command"].get("call")))
    if kind is None:
        raise ValueError(f"call: one of {', '.join(_KINDS)} is expected")
    return from_json(kind, body["command"]), from_json(Mapping[str, int], body["leases"])


def work(ledger: Ledger, command: Command, leases: Mapping[str, int]) -> Callable[[], Any]:
    """Return the command as the ledger's owner runs it; its result is JSON."""
    return lambda: to_json(command.run(ledger.held_by(leases)))
