"""Use the ledger from a process that does not own it: read directly, and let the daemon write.

If the daemon ends, it continues alone, under the kernel's lock: acknowledged writes are on disk in both cases, and a
lease on a device holds for whichever process writes it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autosel.client import Client, Refused, Unreachable
from autosel.errors import LedgerError
from autosel.ledger import commands, snapshot
from autosel.ledger.commands import Command
from autosel.ledger.containment import Strike
from autosel.ledger.engine import Database
from autosel.ledger.host import Host
from autosel.ledger.key import LengthRange
from autosel.ledger.schema import HEAD
from autosel.ledger.store import Imported, Ledger
from autosel.values import Arm, Decision, Fingerprint, Parity, Race, State, Verdict, Workload, from_json

log = logging.getLogger(__name__)
ANSWER_S = 1.0  # a check for a daemon waits no longer
WRITE_S = 60.0  # a commit takes milliseconds; behind many others, and on a slow disk, more


def reach(database: Database, home: Path) -> RemoteLedger | None:
    """Return the ledger through the daemon that owns it, if one answers and uses the same database."""
    ask = Client(home / "run" / "daemon.sock", timeout_s=ANSWER_S)
    if not ask.there:
        return None
    try:
        about = ask.get(commands.ADDRESS)
        same = about["ledger"] == database.name and about["schema"] == HEAD and about["writable"] is True
    except (Unreachable, Refused, KeyError, TypeError) as error:
        log.info("writing without the daemon: %s", error)
        return None
    finally:
        ask.close()
    return RemoteLedger(database, home) if same else None


class RemoteLedger(Ledger):
    """A ledger whose writes go through the daemon. Made by `open_ledger`."""

    def _send(self, command: Command) -> Any:
        """Return the daemon's answer as JSON or, if it no longer answers, the result of the command here.

        A command that may have been carried out is repeated. All are idempotent except A/A sessions, which would count
        double and are then left out.
        """
        line = Client(self.home / "run" / "daemon.sock", timeout_s=WRITE_S)
        try:
            return line.post(commands.ADDRESS, commands.encode(command, self._leases))
        except Unreachable as error:
            log.warning("the daemon no longer answers: continuing without it (%s)", error.why)
            if error.sent and isinstance(command, commands.SaveAA):
                return None
            return commands.work(Ledger(self._database, self.home), command, self._leases)()
        except Refused as error:
            raise LedgerError(error.what, why=error.why, todo=error.todo) from error
        finally:
            line.close()

    def _decided(self, command: Command) -> Decision:
        made: Decision = from_json(Decision, self._send(command))
        return made

    def publish(self, *, patience_s: float = 0.0) -> None:
        """Do nothing: the daemon has published before it acknowledged."""

    # --- decide -----------------------------------------------------------------------------------------------------

    def record(
        self,
        fp: Fingerprint,
        workload: Workload,
        *,
        verdict: Verdict | None,
        race: Race | None,
        parities: Sequence[tuple[Arm, Parity]],
        arm: Arm,
        baseline: Arm,
        mode: str,
        state: State,
        reason: str,
        idempotency_key: str,
        length_range: LengthRange = None,
        entrants: Iterable[str] = (),
    ) -> Decision:
        return self._decided(
            commands.Record(
                fp=fp,
                workload=workload,
                verdict=verdict,
                race=race,
                parities=tuple(parities),
                arm=arm,
                baseline=baseline,
                mode=mode,
                state=state,
                reason=reason,
                idempotency_key=idempotency_key,
                length_range=length_range,
                entrants=tuple(entrants),
            )
        )

    def demote(self, decision_id: int, reason: str) -> Decision:
        return self._decided(commands.ByHand(call="demote", decision_id=decision_id, reason=reason))

    def promote(self, decision_id: int, candidate: str, reason: str) -> Decision:
        return self._decided(
            commands.ByHand(call="promote", decision_id=decision_id, reason=reason, candidate=candidate)
        )

    def pin(self, decision_id: int, reason: str, candidate: str | None = None) -> Decision:
        return self._decided(commands.ByHand(call="pin", decision_id=decision_id, reason=reason, candidate=candidate))

    def renew(self, decision_id: int, *, arm: Arm, baseline: Arm, parity: Parity, why: str) -> Decision | None:
        command = commands.Renew(decision_id=decision_id, arm=arm, baseline=baseline, parity=parity, why=why)
        found = self._send(command)
        return from_json(Decision, found) if found is not None else None

    def unpin(self, decision_id: int, reason: str) -> Decision:
        return self._decided(commands.ByHand(call="unpin", decision_id=decision_id, reason=reason))

    # --- evidence ---------------------------------------------------------------------------------------------------

    def save_parity(self, hw_id: str, workload: Workload, arm: Arm, parity: Parity) -> int:
        return int(self._send(commands.SaveParity(hw_id=hw_id, workload=workload, arm=arm, parity=parity)))

    def take_over(self, hw_id: str, holder: str, unit: str = "") -> tuple[int, list[Strike]]:
        lease, strikes = self._send(commands.TakeOver(hw_id=hw_id, holder=holder, unit=unit))
        return int(lease), [from_json(Strike, s) for s in strikes]

    def open_trial(self, hw_id: str, op: str, arm: Arm) -> int:
        return int(self._send(commands.OpenTrial(hw_id=hw_id, op=op, arm=arm)))

    def close_trial(self, trial_id: int, outcome: str) -> None:
        self._send(commands.CloseTrial(trial_id=trial_id, outcome=outcome))

    def quarantine(
        self,
        arm: Arm,
        *,
        hw_id: str,
        op: str,
        cause: str,
        reason: str,
        digest: str = "",
        driver: str = "",
        evidence: Mapping[str, Any] | None = None,
    ) -> int:
        return int(
            self._send(
                commands.Hold(
                    arm=arm,
                    hw_id=hw_id,
                    op=op,
                    cause=cause,
                    reason=reason,
                    digest=digest,
                    driver=driver,
                    evidence=evidence or {},
                )
            )
        )

    def release(self, quarantine_id: int, reason: str) -> None:
        self._send(commands.Release(quarantine_id=quarantine_id, reason=reason))

    def spend(self, key: str, amount: float, reason: str = "") -> bool:
        return bool(self._send(commands.Spend(key=key, amount=amount, reason=reason)))

    def save_aa(self, hw_id: str, time_class: str, crossings: Iterable[bool]) -> None:
        self._send(commands.SaveAA(hw_id=hw_id, time_class=time_class, crossings=tuple(crossings)))

    def import_(
        self, data: Mapping[str, Any] | bytes | str, hw_id: str, origin: Host | None = None, *, also: Sequence[str] = ()
    ) -> Imported:
        if isinstance(data, Mapping):
            document = data
        else:
            snapshot.parse(data, "the import")
            document = json.loads(data)
        found = self._send(commands.Import(document=document, hw_id=hw_id, origin=origin, also=tuple(also)))
        return Imported(
            served=tuple(self.decision(number) for number in found["served"]),
            waiting=tuple(self.decision(number) for number in found["waiting"]),
            kept=tuple((self.decision(number), why) for number, why in found["kept"]),
        )

    def adopt(self, decision_id: int, parity: Parity) -> bool:
        return bool(self._send(commands.Adopt(decision_id=decision_id, parity=parity)))
