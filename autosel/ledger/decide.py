"""Commands that append a decision: recorded by a tune, by hand, or after a new proof of a stale one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel import settings
from autosel.errors import LedgerError, ParityError, UnknownName
from autosel.ledger import containment, rows
from autosel.ledger import schema as t
from autosel.ledger.describe import release_command
from autosel.ledger.key import LengthRange, overlap, serving_key
from autosel.ledger.rows import StoredDecision
from autosel.ledger.transaction import Command, Transaction
from autosel.values import (
    Arm,
    Decision,
    Failed,
    Fingerprint,
    Parity,
    Passed,
    Race,
    State,
    Verdict,
    Workload,
    canonical_json,
    digest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Command[Decision]):
    """Store a decision with its evidence, and let it serve its key, unless the key is pinned.

    `entrants` adds digests of arms that were considered and not built; those in `parities` count anyway. A promoted arm
    other than the baseline must have passed parity (ParityError), and must not be in quarantine. A second command with
    the same `idempotency_key` returns the first one's decision.
    """

    call: ClassVar[str] = "record"
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
    length_range: LengthRange = None
    entrants: tuple[str, ...] = ()

    def run(self, tx: Transaction) -> Decision:
        canonical_json([self.workload, self.verdict, self.arm, self.baseline])  # refuses NaN and the like
        return recorded(tx.c, self.idempotency_key) or self._store(tx)

    def _store(self, tx: Transaction) -> Decision:
        c, hw_id = tx.c, self.fp.hw_id
        tx.refuse_stale(hw_id)
        if self.state in ("promoted", "pinned") and self.arm.digest != self.baseline.digest:
            if not any(a.digest == self.arm.digest and isinstance(p, Passed) for a, p in self.parities):
                raise ParityError(f"{self.arm.candidate} has not passed parity: it cannot be {self.state}")
            _refuse_quarantined(c, self.arm, hw_id, self.workload.op)
        fingerprint_id = rows.put_fingerprint(c, self.fp)
        race_id = rows.put_race(c, fingerprint_id, self.race) if self.race else None
        proofs = [rows.put_parity(c, tx.host, hw_id, self.workload, a, p) for a, p in self.parities]
        decision = Decision(
            id=0,
            hw_id=hw_id,
            op=self.workload.op,
            bucket=self.workload.bucket,
            created_at="",
            **rows.named(self, ("state", "mode", "workload", "arm", "baseline", "verdict", "reason", "length_range")),
        )
        return decide(
            c,
            decision,
            host=tx.host,
            key=self.idempotency_key,
            entrants={arm.digest for arm, _ in self.parities} | {*self.entrants},
            fingerprint_id=fingerprint_id,
            race_id=race_id,
            proofs=proofs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand(Command[Decision]):
    """Append a decision of a person, which follows the one that serves `decision_id`'s key now.

    `candidate`: another arm that was proven with it; by default its own.
    """

    state: ClassVar[State]
    decision_id: int
    reason: str
    candidate: str | None = None

    def run(self, tx: Transaction) -> Decision:
        c, number = tx.c, self.decision_id
        found = rows.one(c, number)
        now = rows.at_key(c, found.key)
        if now is None:
            raise LedgerError(
                f"decision {number} does not serve here", why="it belongs to another device, or was split"
            )
        arm_id = self._arm(c, found)
        if now.decision.state == self.state and now.arm_id == arm_id:
            return now.decision
        if self.state == "demoted" and now.arm_id != found.arm_id:
            raise LedgerError(
                f"decision {number} no longer serves",
                why=f"decision {now.decision.id} does, with {now.decision.arm.candidate}",
                todo=f"decide {now.decision.id} --demote, if you mean that",
            )
        basis = found if arm_id == found.arm_id else now
        key = f"{self.state}-{number}-{self.candidate or ''}@{now.epoch}"
        return follow(c, tx.host, basis, state=self.state, arm_id=arm_id, reason=self.reason, key=key)

    def _arm(self, c: Connection, found: StoredDecision) -> int:
        """Return the row of the arm that is to serve."""
        own, baseline = found.decision.arm.candidate, found.decision.baseline.candidate
        name = self.candidate or own
        if name in (own, baseline):
            return found.arm_id if name == own else found.baseline_id
        proofs = rows.proofs(c, self.decision_id)
        passed = [arm for arm, parity in proofs if arm.candidate == name and isinstance(parity, Passed)]
        if passed:
            return rows.put_arm(c, passed[-1])
        if any(arm.candidate == name for arm, _ in proofs):
            raise ParityError(f"{name} failed parity for decision {self.decision_id}: it cannot be {self.state}")
        raise UnknownName("candidate", name, tuple(sorted({own, baseline, *(arm.candidate for arm, _ in proofs)})))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote(ByHand):
    """Let another arm of this decision's race serve its key. Raises ParityError if it has not passed."""

    call: ClassVar[str] = "promote"
    state: ClassVar[State] = "promoted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(ByHand):
    """Let this decision's arm (or another that passed parity with it) serve until it is unpinned, regardless of
    races."""

    call: ClassVar[str] = "pin"
    state: ClassVar[State] = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote(ByHand):
    """Let the baseline serve this decision's key from now on. Repeating it has no effect."""

    call: ClassVar[str] = "demote"
    state: ClassVar[State] = "demoted"

    def _arm(self, c: Connection, found: StoredDecision) -> int:
        return found.baseline_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin(ByHand):
    """Let the decision that the pin displaced serve again. Raises LedgerError if the decision is not a pin that
    serves."""

    call: ClassVar[str] = "unpin"

    def run(self, tx: Transaction) -> Decision:
        c, key = tx.c, f"unpin-{self.decision_id}"
        known = recorded(c, key)
        if known is not None:
            return known
        found = rows.one(c, self.decision_id)
        if found.epoch is None or found.decision.state != "pinned":
            raise LedgerError(
                f"decision {self.decision_id} is not a pin that serves", todo=f"{settings.spelling()} explain --history"
            )
        back = found
        while back.decision.state == "pinned" and back.previous_id is not None:
            back = rows.one(c, back.previous_id)
        if back.decision.state == "pinned":  # nothing served before
            return follow(c, tx.host, found, state="kept", arm_id=found.baseline_id, reason=self.reason, key=key)
        state, arm_id = back.decision.state, back.arm_id
        return follow(c, tx.host, back, state=state, arm_id=arm_id, reason=self.reason, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(Command[Decision | None]):
    """Store a new proof of a stale decision's arm. If it passed, `arm` and `baseline` (its arms now) serve instead,
    marked stale by `why`, until the next race.

    The result is None if they do not serve: the proof failed, or another decision serves by now. Raises LedgerError for
    an arm in quarantine.
    """

    call: ClassVar[str] = "renew"
    decision_id: int
    arm: Arm
    baseline: Arm
    parity: Parity
    why: str

    def run(self, tx: Transaction) -> Decision | None:
        c, found = tx.c, rows.one(tx.c, self.decision_id)
        d = found.decision
        tx.refuse_stale(d.hw_id)
        proof = rows.put_parity(c, tx.host, d.hw_id, d.workload, self.arm, self.parity)
        key = f"renew-{d.id}-{digest([self.arm.digest, self.baseline.digest])[:16]}"
        known = recorded(c, key)
        if known is not None or isinstance(self.parity, Failed) or found.epoch is None:
            return known
        _refuse_quarantined(c, self.arm, d.hw_id, d.op)
        arm_id, found = rows.put_arm(c, self.arm), replace(found, baseline_id=rows.put_arm(c, self.baseline))
        reason = f"proven again, and served until it is raced again: {self.why}"
        return follow(
            c, tx.host, found, state=d.state, arm_id=arm_id, reason=reason, key=key, proof=proof, stale=self.why
        )


def _refuse_quarantined(c: Connection, arm: Arm, hw_id: str, op: str) -> None:
    for q in containment.active(c, hw_id, op):
        if q.digest in (arm.digest, arm.build):
            raise LedgerError(
                f"{arm.candidate} is in quarantine: {q.reason}",
                todo=f"{release_command([q.id])} if you know better",
            )


# --- appending ----------------------------------------------------------------------------------------------------


def decide(
    c: Connection,
    d: Decision,
    *,
    host: int | None,
    key: str,
    entrants: Iterable[str] = (),
    fingerprint_id: int | None = None,
    race_id: int | None = None,
    proofs: Iterable[int] = (),
    serves: bool = True,
) -> Decision:
    """Append a decision, and let it serve instead of every row of its bucket that it overlaps."""
    served = rows.of_bucket(c, d.hw_id, d.mode, d.bucket)
    rivals = [s for s in served if overlap(s.decision.length_range, d.length_range)]
    new = StoredDecision(
        decision=d,
        key=serving_key(d.hw_id, d.mode, d.bucket, d.length_range),
        workload_id=rows.put_workload(c, d.workload),
        fingerprint_id=fingerprint_id,
        arm_id=rows.put_arm(c, d.arm),
        baseline_id=rows.put_arm(c, d.baseline),
        race_id=race_id,
        verdict_id=rows.put_verdict(c, race_id, d.verdict) if d.verdict else None,
        previous_id=max((s.decision.id for s in rivals), default=None),
        entrants=tuple(sorted({*entrants, d.arm.digest, d.baseline.digest})),
    )
    made = _append(c, new, host, key, proofs)
    pinned = any(s.decision.state == "pinned" for s in rivals)
    if serves and (d.state == "pinned" or not pinned):
        rows.serve(c, new.key, made, [s.key for s in rivals])
    return rows.one(c, made).decision


def follow(
    c: Connection,
    host: int,
    found: StoredDecision,
    *,
    state: State,
    arm_id: int,
    reason: str,
    key: str,
    proof: int | None = None,
    stale: str | None = None,
) -> Decision:
    """Append a decision for the same key with the same evidence, and one more proof if given, and let it serve. It
    inherits the staleness of the decision that it follows, unless `stale` is given."""
    d, now = found.decision, rows.at_key(c, found.key)
    known = recorded(c, key)
    if known is not None:
        return known
    changed = replace(d, state=state, reason=reason, stale=d.stale if stale is None else stale)
    previous = now.decision.id if now else d.id
    proofs = t.decision_parities.c
    known_proofs = c.execute(sa.select(proofs.parity_id).where(proofs.decision_id == d.id)).scalars().all()
    new = replace(found, decision=changed, arm_id=arm_id, previous_id=previous)
    made = _append(c, new, host, key, [*known_proofs, *([] if proof is None else [proof])])
    rows.serve(c, found.key, made)
    return rows.one(c, made).decision


def _append(c: Connection, new: StoredDecision, host: int | None, idempotency_key: str, proofs: Iterable[int]) -> int:
    d = new.decision
    made = rows.insert(
        c,
        t.decisions,
        key=new.key,
        **rows.named(d, rows.OF_VALUE),
        length_from=d.length_range[0] if d.length_range else None,
        length_to=d.length_range[1] if d.length_range else None,
        **rows.named(new, rows.IDS),
        entrants=json.dumps(list(new.entrants)),
        idempotency_key=idempotency_key,
        created_at=rows.now(),
        host_id=host,
    )
    for proof in dict.fromkeys(proofs):
        c.execute(sa.insert(t.decision_parities).values(decision_id=made, parity_id=proof))
    return made


_OF_KEY = sa.select(t.decisions.c.id).where(t.decisions.c.idempotency_key == sa.bindparam("of"))


def recorded(c: Connection, key: str) -> Decision | None:
    """Return the decision that an earlier command with this idempotency key stored."""
    found = c.execute(_OF_KEY, {"of": key}).scalar()
    return rows.one(c, int(found)).decision if found is not None else None
