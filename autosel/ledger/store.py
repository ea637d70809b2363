"""Combine the database, the device lock and the serving snapshot into one ledger object.

Every method that changes something is one transaction, on disk and published when it returns: its result is
acknowledged and survives `kill -9` and power loss. If a call was killed before it returned, its change may or may not
be stored; calling again with the same idempotency key yields the one decision.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel import settings
from autosel.errors import LedgerError, ParityError, UnknownName
from autosel.ledger import containment, intake, migrate, rows, server, snapshot
from autosel.ledger import schema as t
from autosel.ledger.containment import Quarantine, Strike
from autosel.ledger.describe import release_command
from autosel.ledger.engine import BUSY_S, OPEN_S, Database, lost, private_folder, refuse_shared
from autosel.ledger.host import Host, here
from autosel.ledger.key import LengthRange, budget_key, overlap, serving_key
from autosel.ledger.locks import InUseError, device_lock, publish_lock, whoami
from autosel.ledger.rows import Stored
from autosel.values import (
    WHOLE_STEP,
    Arm,
    Decision,
    Failed,
    Fingerprint,
    NativeRecipe,
    Parity,
    Passed,
    PythonRecipe,
    Race,
    State,
    Verdict,
    Workload,
    canonical_json,
    digest,
    length_bucket,
    to_json,
)

_NOBODY = -1  # a host that has not stored anything yet
LIFETIME_BUDGET = 0.01  # maximum total false-promotion probability of all attempts at one key (design section 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Hold a decision and all its evidence. `previous` is the decision that served the key before."""

    decision: Decision
    fingerprint: Fingerprint | None
    race: Race | None
    parities: tuple[tuple[Arm, Parity], ...]
    previous: Decision | None
    serves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Hold a served decision. `host` decided it (its id; empty if unknown); `usable`: its arm has passed parity on this
    host."""

    key: str
    epoch: int
    decision: Decision
    host: str = ""
    usable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Report an import: the decisions that serve now; those that wait for this host's own proof; and those only stored,
    each with the reason."""

    served: tuple[Decision, ...]
    waiting: tuple[Decision, ...]
    kept: tuple[tuple[Decision, str], ...]


def open_ledger(url: str | None = None, home: Path | None = None, *, alone: bool = False) -> Ledger:
    """Create, migrate and check the ledger, store the faults seen in service, then publish its decisions.

    If the daemon of this home answers, it writes (unless `alone`), and has done all of that. A ledger that cannot be
    written is opened for reading. Raises LedgerError if it is corrupt, locked, of a newer version, or missing and
    cannot be created.
    """
    home = home or settings.home()
    database = Database(url or (f"sqlite:///{home / 'ledger.db'}" if home != settings.home() else settings.db_url()))
    if not alone:
        from autosel.ledger.remote import reach

        through = reach(database, home)
        if through is not None:
            return through
    if database.path is not None:
        _prepare_file(database, database.path)
    ledger = Ledger(database, home)
    migrate.check(database)
    migrate.upgrade(database)
    if database.shared:
        database.find_access()
    if ledger.writable:
        intake.take_in(ledger)
    if ledger.writable or (database.shared and os.access(home, os.W_OK)):
        with suppress(InUseError):  # the process that publishes now, or waits to, includes this
            ledger.publish(patience_s=OPEN_S)
    return ledger


class Ledger:
    """Hold the ledger. Made by `open_ledger`. Threads may share it."""

    def __init__(self, database: Database, home: Path) -> None:
        self._database, self.home = database, home
        self._documents: dict[int, dict[str, Any]] = {}
        self._group = threading.local()  # .publish: whether this thread must publish after `together`
        self._leases: dict[str, int] = {}  # of the devices that this process holds
        self._trials: set[int] = set()  # open ones
        self._host_id = 0
        self.publications = 0  # number of publications

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def name(self) -> str:
        return self._database.name

    @property
    def writable(self) -> bool:
        return self._database.writable

    @property
    def shared(self) -> bool:
        """Return True if other hosts read and write it too."""
        return self._database.shared

    @property
    def url(self) -> sa.URL:
        return self._database.url

    @property
    def failed(self) -> bool:
        """Return True if a write or an fsync failed. Then this object only reads; the ledger can be opened again."""
        return self._database.failed

    def keep_line(self) -> None:
        """Keep the connection to the database open between writes. For one thread that writes often, in a process that
        does not fork, and that calls `move_log` now and then."""
        self._database.keep_line()

    def move_log(self) -> None:
        self._database.move_log()

    def together(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """Make several calls in one transaction, then publish once; all are acknowledged when this returns. Return each
        call's result, or the exception with which it changed nothing.

        A call may be made twice: if one raises, all are rolled back and repeated, each with a savepoint, which is
        rarely needed and would cost every group. Raises LedgerError if the transaction as a whole failed, and then
        nothing is changed.
        """
        group = list(calls)
        try:
            found, changed = self._grouped(group, apart=False)
        except Exception as error:
            if lost(error):
                raise
            found, changed = self._grouped(group, apart=True)
        if changed:  # already committed: if this fails, nothing must be repeated
            self.publish()
        return found

    def _grouped(self, calls: Sequence[Callable[[], Any]], *, apart: bool) -> tuple[list[Any], bool]:
        """Return the results of the calls, and whether the snapshot must be published."""
        self._group.publish = False
        try:
            with self._database.together():
                found = [self._apart(call) if apart else call() for call in calls]
            return found, bool(self._group.publish)
        finally:
            del self._group.publish

    def _apart(self, call: Callable[[], Any]) -> Any:
        """Return a call's result, or the exception that it raised, with its writes undone."""
        try:
            with self._database.part():
                return call()
        except Exception as error:
            if lost(error):
                raise
            return error

    def held_by(self, leases: Mapping[str, int]) -> Ledger:
        """Return the same ledger for another process, which holds these devices."""
        if not leases:
            return self
        other = Ledger(self._database, self.home)
        other._documents, other._group, other._leases = self._documents, self._group, dict(leases)
        other._host_id = self._host_id
        return other

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
        """Store a decision with its evidence, and let it serve its key, unless the key is pinned.

        `entrants` adds digests of arms that were considered and not built; those in `parities` count anyway. A promoted
        arm other than the baseline must have passed parity (ParityError), and must not be in quarantine.
        """
        canonical_json([workload, verdict, arm, baseline])  # refuse NaN and the like before writing
        hw_id = fp.hw_id
        considered = {a.digest for a, _ in parities} | {arm.digest, baseline.digest, *entrants}

        def write(c: Connection) -> int:
            self._refuse_stale(c, hw_id)
            if state in ("promoted", "pinned") and arm.digest != baseline.digest:
                _refuse_unproven(arm, state, parities)
                _refuse_quarantined(arm, containment.active(c, hw_id, workload.op))
            fingerprint_id = rows.put_fingerprint(c, fp)
            race_id = rows.put_race(c, fingerprint_id, race) if race else None
            here = self._here(c)
            proofs = [rows.put_parity(c, here, hw_id, workload, a, p) for a, p in parities]
            return _decide(
                c,
                host=here,
                state=state,
                hw_id=hw_id,
                workload=workload,
                mode=mode,
                length_range=length_range,
                fingerprint_id=fingerprint_id,
                arm_id=rows.put_arm(c, arm),
                baseline_id=rows.put_arm(c, baseline),
                race_id=race_id,
                verdict_id=rows.put_verdict(c, race_id, verdict) if verdict else None,
                entrants=sorted(considered),
                reason=reason,
                idempotency_key=idempotency_key,
                proofs=proofs,
            )

        return self._acknowledged(write, idempotency_key)

    def demote(self, decision_id: int, reason: str) -> Decision:
        """Let the baseline serve this decision's key from now on. Repeating it has no effect."""
        return self._change(decision_id, "demoted", reason, _baseline_of, f"demote-{decision_id}")

    def promote(self, decision_id: int, candidate: str, reason: str) -> Decision:
        """Let another arm of this decision's race serve its key, by hand. Raises ParityError if it has not passed."""
        return self._by_hand(decision_id, "promoted", candidate, reason)

    def pin(self, decision_id: int, reason: str, candidate: str | None = None) -> Decision:
        """Let this decision's arm (or another that passed parity with it) serve until it is unpinned, regardless of
        races."""
        return self._by_hand(decision_id, "pinned", candidate, reason)

    def unpin(self, decision_id: int, reason: str) -> Decision:
        """Let the decision that the pin displaced serve again. Raises LedgerError if the decision is not a pin that
        serves."""

        def write(c: Connection) -> int:
            found = rows.one(c, decision_id)
            if found.epoch is None or found.decision.state != "pinned":
                raise LedgerError(
                    f"decision {decision_id} is not a pin that serves", todo=f"{settings.spelling()} history"
                )
            back = found
            while back.decision.state == "pinned" and back.previous_id is not None:
                back = rows.one(c, back.previous_id)
            if back.decision.state == "pinned":  # nothing served before
                back = replace(found, arm_id=found.baseline_id)
            state = "kept" if back.decision.state == "pinned" else back.decision.state
            arm_id = back.arm_id
            key = f"unpin-{decision_id}"
            return _follow(c, self._here(c), back, state=state, arm_id=arm_id, reason=reason, key=key)

        return self._acknowledged(write, f"unpin-{decision_id}")

    def _by_hand(self, decision_id: int, state: State, candidate: str | None, reason: str) -> Decision:
        def choose(c: Connection, found: Stored) -> int:
            name = candidate or found.decision.arm.candidate
            if name in (found.decision.arm.candidate, found.decision.baseline.candidate):
                same = name == found.decision.arm.candidate
                return found.arm_id if same else found.baseline_id
            proofs = _proofs(c, decision_id)
            passed = [arm for arm, parity in proofs if arm.candidate == name and isinstance(parity, Passed)]
            if passed:
                return rows.put_arm(c, passed[-1])
            if any(arm.candidate == name for arm, _ in proofs):
                raise ParityError(f"{name} failed parity for decision {decision_id}: it cannot be {state}")
            known = {found.decision.arm.candidate, found.decision.baseline.candidate, *(a.candidate for a, _ in proofs)}
            raise UnknownName("candidate", name, tuple(sorted(known)))

        return self._change(decision_id, state, reason, choose, f"{state}-{decision_id}-{candidate or ''}")

    def renew(self, decision_id: int, *, arm: Arm, baseline: Arm, parity: Parity, why: str) -> Decision | None:
        """Store a new proof of a stale decision's arm. If it passed, `arm` and `baseline` (its arms now) serve instead,
        marked stale by `why`, until the next race. Return None if they do not serve: the proof failed, or another
        decision serves by now. Raises LedgerError for an arm in quarantine."""

        def write(c: Connection) -> int | None:
            found = rows.one(c, decision_id)
            d = found.decision
            self._refuse_stale(c, d.hw_id)
            here = self._here(c)
            proof = rows.put_parity(c, here, d.hw_id, d.workload, arm, parity)
            key = f"renew-{decision_id}-{digest([arm.digest, baseline.digest])[:16]}"
            known = _by_idempotency(c, key)
            if known is not None or isinstance(parity, Failed) or found.epoch is None:
                return known
            _refuse_quarantined(arm, containment.active(c, d.hw_id, d.op))
            arms = rows.put_arm(c, arm), rows.put_arm(c, baseline)
            return _renewed(c, here, found, arms, proof, why, key)

        with self._database.writing() as c:
            made = write(c)
            renewed = rows.one(c, made).decision if made is not None else None
        self.publish()
        return renewed

    def _change(
        self, decision_id: int, state: State, reason: str, choose: Callable[[Connection, Stored], int], key: str
    ) -> Decision:
        """Append a decision that follows the one serving `decision_id`'s key."""

        def write(c: Connection) -> int:
            found = rows.one(c, decision_id)
            now = rows.at_key(c, found.key)
            if now is None:
                raise LedgerError(
                    f"decision {decision_id} does not serve here", why="it belongs to another device, or was split"
                )
            arm_id = choose(c, found)
            if now.decision.state == state and now.arm_id == arm_id:
                return now.decision.id
            if state == "demoted" and now.arm_id != found.arm_id:
                raise LedgerError(
                    f"decision {decision_id} no longer serves",
                    why=f"decision {now.decision.id} does, with {now.decision.arm.candidate}",
                    todo=f"demote {now.decision.id} if you mean that",
                )
            basis = found if arm_id == found.arm_id else now
            here = self._here(c)
            return _follow(c, here, basis, state=state, arm_id=arm_id, reason=reason, key=f"{key}@{now.epoch}")

        return self._acknowledged(write, None)

    def _acknowledged(self, write: Callable[[Connection], int], idempotency_key: str | None) -> Decision:
        """Commit, publish, and only then return."""
        with self._database.writing() as c:
            known = _by_idempotency(c, idempotency_key) if idempotency_key else None
            made = rows.one(c, known if known is not None else write(c))
        self.publish()
        return made.decision

    # --- what serves ------------------------------------------------------------------------------------------------

    def publish(self, *, patience_s: float = BUSY_S) -> None:
        """Replace the snapshot by the current decisions. Raises LedgerError if they are stored but not yet visible to
        `best()`."""
        if hasattr(self._group, "publish"):
            self._group.publish = True
            return
        path = self.home / snapshot.FILE
        self.publications += 1
        with publish_lock(self.home, patience_s):  # read under the lock, so that the last publication is the latest
            snapshot.sweep(path)
            snapshot.publish(path, self.export())

    def serving(self, *, everywhere: bool = False) -> tuple[Served, ...]:
        """Return the decisions that serve this host. If another host decided a key, and its arm has not passed parity
        here, the previous decision serves. `everywhere`: all serving decisions of the ledger, usable here or not."""
        with self._database.reading() as c:
            found = rows.fetch(c, rows.stored(serving=True, host=self._prover(c)).order_by(t.serving.c.key))
            served = [(s, s if everywhere else self._usable(c, s)) for s in found]
        return tuple(
            Served(key=s.key, epoch=s.epoch or 0, decision=ours.decision, host=ours.host, usable=s.usable)
            for s, ours in served
            if ours is not None
        )

    def _usable(self, c: Connection, serves: Stored) -> Stored | None:
        """Return the decision if its arm was proven here, else the latest earlier one that was, and is not
        quarantined."""
        found, held = serves, None
        while not found.usable:
            if found.previous_id is None:
                return None
            found = rows.one(c, found.previous_id, host=self._prover(c))
            if found.key != serves.key:
                return None
            if held is None:
                held = {q.digest for q in containment.active(c, found.decision.hw_id, found.decision.op)}
            if held & {found.decision.arm.digest, found.decision.arm.build}:
                return None
        return found

    def _here(self, c: Connection) -> int:
        """Return the row of this host, created at its first write."""
        return self._seen_host(c) or rows.put_host(c, here(self.home))

    def _seen_host(self, c: Connection) -> int:
        if not self._host_id:
            self._host_id = rows.host_id(c, here(self.home)) or 0
        return self._host_id

    def _prover(self, c: Connection) -> int:
        """Return whose proofs count: this host's, or any in a file, which belongs to one host. An import contains no
        proofs."""
        return (self._seen_host(c) or _NOBODY) if self.shared else rows.ANY_HOST

    def known(
        self, hw_id: str, bucket: str, mode: str, digests: Iterable[str], *, length_range: LengthRange = None
    ) -> Decision | None:
        """Return the settled decision of a bucket, if nothing that it depends on has changed, so that no measurement is
        needed.

        `digests` are the arms eligible now, including the baseline. Return None for a new or edited arm, another
        baseline, or an undecided verdict. For a split bucket without `length_range`: the row for the longest contexts.
        """
        found = self.known_rows(hw_id, bucket, mode, digests)
        if length_range is not None:
            found = tuple(d for d in found if d.length_range == length_range)
        return found[-1] if found else None

    def known_rows(self, hw_id: str, bucket: str, mode: str, digests: Iterable[str]) -> tuple[Decision, ...]:
        """Return all rows of a settled bucket, or none."""
        now = set(digests)
        with self._database.reading() as c:
            found = rows.of_bucket(c, hw_id, mode, bucket, self._prover(c))
        settled = all(_still_holds(s, now) for s in found) and _whole([s.decision for s in found])
        return tuple(s.decision for s in found) if settled else ()

    def serving_rows(self, hw_id: str, bucket: str, mode: str) -> tuple[Decision, ...]:
        """Return the decisions that serve a bucket now: one, or one for each part of a split, shortest contexts
        first."""
        with self._database.reading() as c:
            return tuple(s.decision for s in rows.of_bucket(c, hw_id, mode, bucket))

    # --- evidence ---------------------------------------------------------------------------------------------------

    def save_parity(self, hw_id: str, workload: Workload, arm: Arm, parity: Parity) -> int:
        """Store one proof at once, so that a killed tune need not repeat it. Return its id."""
        with self._database.writing() as c:
            return rows.put_parity(c, self._here(c), hw_id, workload, arm, parity)

    def parity_known(self, hw_id: str, digest: str, workload: Workload, *, since: str = "") -> Parity | None:
        """Return this host's latest proof of the arm with this digest, for the workload's bucket, dtype and traits. A
        failure from before `since` is ignored."""
        p = t.parities.c
        query = (
            sa.select(p.outcome, p.document, p.created_at)
            .join(t.candidates, p.candidate_id == t.candidates.c.id)
            .where(p.hw_id == hw_id, p.scope == workload.bucket, t.candidates.c.digest == digest)
            .order_by(p.id.desc())
            .limit(1)
        )
        with self._database.reading() as c:
            prover = self._prover(c)
            row = c.execute(query if prover == rows.ANY_HOST else query.where(p.host_id == prover)).first()
        known = rows.parity_of(row.outcome, row.document) if row else None
        return None if isinstance(known, Failed) and row is not None and row.created_at < since else known

    def decision(self, decision_id: int) -> Decision:
        """Return a decision with its evidence. Raises LedgerError if it does not exist."""
        with self._database.reading() as c:
            return rows.one(c, decision_id).decision

    def evidence(self, decision_id: int) -> Evidence:
        with self._database.reading() as c:
            found = rows.one(c, decision_id)
            race = _document(c, t.races, found.race_id)
            fingerprint = _document(c, t.fingerprints, found.fingerprint_id)
            return Evidence(
                decision=found.decision,
                fingerprint=rows.value_of(Fingerprint, fingerprint) if fingerprint else None,
                race=rows.race_of(race) if race else None,
                parities=tuple(_proofs(c, decision_id)),
                previous=rows.one(c, found.previous_id).decision if found.previous_id else None,
                serves=found.epoch is not None,
            )

    def history(self, op: str | None = None, *, limit: int | None = None, before: int | None = None) -> list[Decision]:
        """Return decisions, newest first; `before`: only those with a lower number."""
        query = rows.stored().order_by(t.decisions.c.id.desc()).limit(limit)
        if op is not None:
            query = query.where(t.decisions.c.op == op)
        if before is not None:
            query = query.where(t.decisions.c.id < before)
        with self._database.reading() as c:
            return [s.decision for s in rows.fetch(c, query)]

    def fingerprint(self, env_id: str) -> Fingerprint | None:
        """Return the latest fingerprint stored for this device and software, measured then."""
        f = t.fingerprints.c
        query = sa.select(f.document).where(f.env_id == env_id).order_by(f.id.desc()).limit(1)
        with self._database.reading() as c:
            found = c.execute(query).scalar()
        return rows.value_of(Fingerprint, found) if found else None

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a consistent view of the tables, for queries that no method here answers."""
        return self._database.reading()

    # --- containment ------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, hw_id: str, unit: str = "") -> Iterator[list[Strike]]:
        """Lock the device for measuring; LedgerError at once, naming the holder, if it is taken. `unit` selects one of
        several equal devices of this machine.

        Yield the arms whose trial was interrupted by a predecessor's death; those with too many strikes are quarantined
        already. If the lock is lost, and another process takes the device, later measurements can no longer be stored.
        """
        with device_lock(self.home, hw_id, unit), self._device_of_all(hw_id, unit):
            if not self.writable:
                yield []
                return
            self._leases[hw_id], strikes = self.take_over(hw_id, whoami(), unit)
            try:
                yield strikes
            finally:
                with suppress(LedgerError):
                    self._stop_trials()
                self._leases.pop(hw_id, None)

    def _device_of_all(self, hw_id: str, unit: str) -> AbstractContextManager[None]:
        """Lock the device at the server, because other homes and containers of this machine share it."""
        if not self.shared:
            return nullcontext()
        name = " ".join(["autosel device", hw_id, containment.machine(), *([unit] if unit else [])])
        return server.session_lock(self._database.engine, name, "this device")

    def take_over(self, hw_id: str, holder: str, unit: str = "") -> tuple[int, list[Strike]]:
        """Take a new lease, which ends all earlier ones; open trials of their holders are closed. `lock` uses this."""
        with self._database.writing() as c:
            values = {"hw_id": hw_id, "machine": containment.machine(), "holder": holder, "created_at": rows.now()}
            lease = rows.insert(c, t.leases, unit=unit, **values)
            here = self._here(c)
            found = containment.close_abandoned(c, here, hw_id, unit)
            for strike in found:
                if strike.out:
                    held = strike.arm.build or strike.arm.digest
                    cause, evidence = containment.CUT_SHORT, {"strikes": strike.strikes}
                    _hold(c, here, strike.arm, held, hw_id, strike.op, cause, strike.reason, evidence)
        if any(strike.out for strike in found):
            self.publish()
        return lease, found

    def _refuse_stale(self, c: Connection, hw_id: str) -> str:
        """Return the unit that this process holds of a device, if any. Raises LedgerError if another process has taken
        the lease since."""
        if hw_id not in self._leases:
            return ""
        lease, held = t.leases.c, self._leases[hw_id]
        unit = sa.select(lease.unit).where(lease.id == held).scalar_subquery()
        mine = sa.and_(lease.hw_id == hw_id, lease.machine == containment.machine(), lease.unit == unit)
        query = sa.select(lease.id, lease.holder, lease.created_at, lease.unit).where(mine)
        last = c.execute(query.order_by(lease.id.desc()).limit(1)).first()
        if last is None:
            raise LedgerError(f"no such lease: {held} of this device")
        if last.id != held:
            raise LedgerError(
                "another process has taken over this device: later measurements of this process are not stored",
                why=f"{last.holder} took it at {last.created_at[:19]}Z; was the folder of locks deleted?",
                todo="let it finish, then run the command again",
            )
        return str(last.unit)

    @contextmanager
    def trial(self, hw_id: str, op: str, arm: Arm) -> Iterator[int]:
        """Journal that an arm is about to run; closed on leaving, also by an exception or Ctrl-C."""
        trial_id = self.open_trial(hw_id, op, arm)
        self._trials.add(trial_id)
        outcome = containment.FINISHED
        try:
            yield trial_id
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self._close_trial(trial_id, outcome)

    def _close_trial(self, trial_id: int, outcome: str) -> None:
        with suppress(KeyError):
            self._trials.remove(trial_id)  # KeyError: another thread has closed it
            try:
                self.close_trial(trial_id, outcome)
            except LedgerError:
                self._trials.add(trial_id)
                raise

    def open_trial(self, hw_id: str, op: str, arm: Arm) -> int:
        """Open a trial; `trial` uses this and `close_trial`."""
        with self._database.writing() as c:
            unit = self._refuse_stale(c, hw_id)
            return containment.open_trial(c, self._here(c), hw_id, unit, op, arm)

    def close_trial(self, trial_id: int, outcome: str) -> None:
        with self._database.writing() as c:
            containment.close_trial(c, trial_id, outcome)

    def _stop_trials(self) -> None:
        """Close open trials of threads that Ctrl-C did not wait for: they do not count as strikes."""
        for trial_id in sorted(self._trials):
            self._close_trial(trial_id, "stopped")

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
        """Quarantine a build (`digest`; default the arm's) of an op on a device; the baseline serves in its place."""
        with self._database.writing() as c:
            held = digest or arm.digest
            made = _hold(c, self._here(c), arm, held, hw_id, op, cause, reason, evidence or {}, driver)
        self.publish()
        return made

    def quarantined(self, hw_id: str, op: str | None = None, driver: str | None = None) -> dict[str, Quarantine]:
        """Return quarantines by build digest."""
        with self._database.reading() as c:
            return {q.digest: q for q in containment.active(c, hw_id, op, driver)}

    def released(self, hw_id: str, op: str) -> dict[str, str]:
        """Return when the last quarantine of each build of an op ended on a device, by digest."""
        with self._database.reading() as c:
            return containment.released(c, hw_id, op)

    def release(self, quarantine_id: int, reason: str) -> None:
        """End a quarantine. Its demotions last until the next race, which the next tune runs."""
        with self._database.writing() as c:
            containment.release(c, quarantine_id, reason)

    # --- error budget -----------------------------------------------------------------------------------------------

    def spend(self, key: str, amount: float, reason: str = "") -> bool:
        """Debit an attempt's false-promotion bound from the lifetime of `budget_key(...)`; return False, with nothing
        debited, if it exceeds the rest."""
        with self._database.writing() as c:
            self._refuse_stale(c, key.partition("/")[0])
            values = {"of": key, "more": amount, "why": reason, "at": rows.now(), "most": LIFETIME_BUDGET * (1 + 1e-9)}
            return c.execute(_DEBIT, values).rowcount == 1

    def spent(self, key: str) -> float:
        with self._database.reading() as c:
            return _spent(c, key)

    def save_aa(self, hw_id: str, time_class: str, crossings: Iterable[bool]) -> None:
        """Store A/A sessions: whether a clone of the baseline crossed the threshold against it."""
        with self._database.writing() as c:
            self._refuse_stale(c, hw_id)
            for crossed in crossings:
                values = {"hw_id": hw_id, "time_class": time_class, "crossed": int(crossed), "created_at": rows.now()}
                rows.insert(c, t.aa_sessions, **values)

    def aa(self, hw_id: str, time_class: str) -> tuple[int, int]:
        """Return (A/A sessions, how many crossed) so far on this device for ops of this duration."""
        a = t.aa_sessions.c
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(a.crossed), 0))
        with self._database.reading() as c:
            count, crossed = c.execute(query.where(a.hw_id == hw_id, a.time_class == time_class)).one()
        return int(count), int(crossed)

    # --- in and out -------------------------------------------------------------------------------------------------

    def export(self, path: Path | None = None) -> dict[str, Any]:
        """Return the serving decisions in the snapshot's format; also write them to `path` if given."""
        served = self.serving()
        epoch = max((s.epoch for s in served), default=0)
        lines = [{"key": s.key, "epoch": s.epoch, "decision": self._document(s.decision)} for s in served]
        made = snapshot.document(epoch, lines)
        if path is not None:
            snapshot.write(path, made)
        return made

    def _document(self, decision: Decision) -> dict[str, Any]:
        """Return a decision as JSON, which is cached because a decision never changes."""
        if decision.id not in self._documents:
            self._documents[decision.id] = to_json(decision)
        return self._documents[decision.id]

    def import_(
        self, data: Mapping[str, Any] | bytes | str, hw_id: str, origin: Host | None = None, *, also: Sequence[str] = ()
    ) -> Imported:
        """Import an export, of another host if `origin` names it: all rows or none. Raises BadConfig unless it is a
        complete export. `also`: this machine's other devices.

        Rows of other devices do not serve here, nor do rows that would import a module outside autosel, because data
        must not introduce code. A local pin stays. An arm that has not passed parity on this host waits until it has
        (`adopt`), and the previous decision keeps serving.
        """
        where = "the import"
        found = snapshot.validate(data, where) if isinstance(data, Mapping) else snapshot.parse(data, where)
        decisions = [row.decision for row in found.rows]
        served: list[Decision] = []
        waiting: list[Decision] = []
        kept: list[tuple[Decision, str]] = []
        with self._database.writing() as c:
            owner = rows.put_host(c, origin) if origin else None
            for d in decisions:
                why = _refusal(c, d, d.hw_id if d.hw_id in also else hw_id)
                made = rows.one(c, _import_one(c, owner, d, found.digest, serves=not why), host=self._prover(c))
                if why:
                    kept.append((made.decision, why))
                else:
                    (served if made.usable else waiting).append(made.decision)
        self.publish()
        return Imported(served=tuple(served), waiting=tuple(waiting), kept=tuple(kept))

    def offered(self, hw_id: str, mode: str) -> tuple[Decision, ...]:
        """Return decisions of other hosts for this kind of device that wait for this host's proof of their arm."""
        found = self.serving(everywhere=True)
        return tuple(s.decision for s in found if not s.usable and (s.decision.hw_id, s.decision.mode) == (hw_id, mode))

    def incomplete(self, hw_id: str = "", mode: str = "") -> tuple[tuple[Decision, Passed], ...]:
        """Return decisions that serve, of this device and mode if given, whose proof left out rows of their op's array,
        with that proof. Stale ones are proven again in any case."""
        found = []
        for served in self.serving():
            d = served.decision
            if d.op == WHOLE_STEP or d.stale or (hw_id and (d.hw_id, d.mode) != (hw_id, mode)):
                continue
            known = self.parity_known(d.hw_id, d.arm.digest, d.workload)
            if isinstance(known, Passed) and 0 < known.pairs < known.pairs_of:
                found.append((d, known))
        return tuple(found)

    def adopt(self, decision_id: int, parity: Parity) -> bool:
        """Store this host's own proof of a decision's arm; return True if it serves here from now on."""
        with self._database.writing() as c:
            d = rows.one(c, decision_id).decision
            rows.put_parity(c, self._here(c), d.hw_id, d.workload, d.arm, parity)
        self.publish()
        return any(s.decision.id == decision_id for s in self.serving())

    def grant(self, role: str, login: str, *, only_say: bool = False) -> list[str]:
        """Let a role of the server read, record or administer; return the statements. Raises LedgerError."""
        if not self.shared:
            raise LedgerError(
                "a ledger in a file has no roles",
                why=f"who may read or write {self.name} depends on its permissions",
                todo="AUTOSEL_DB=postgresql+psycopg://user@host/database shares one",
            )
        with self._database.reading() as c:
            database, schema = c.exec_driver_sql("SELECT current_database(), current_schema()").one()
        made = server.grants(role, login, database, schema, t.HISTORY)
        if not only_say:
            with self._database.writing() as c:
                for line in made:
                    c.exec_driver_sql(line)
        return made

    def backup(self, path: Path) -> None:
        """Make a consistent copy of a SQLite ledger while it is in use."""
        migrate.backup(self._database, path)

    def check(self) -> None:
        """Check every page, index and reference. Raises LedgerError if something is damaged."""
        migrate.check(self._database, deep=True)


# --- opening ------------------------------------------------------------------------------------------------------


def _prepare_file(database: Database, path: Path) -> None:
    """Create a new private file, or find out whether the existing one can be written."""
    if not path.exists():
        private_folder(path.parent)
        try:
            path.touch(mode=0o600)
        except OSError as error:
            raise LedgerError(
                f"cannot create the ledger {path}", why=str(error), todo="set AUTOSEL_HOME to a folder you can write"
            ) from error
        return
    refuse_shared(path)
    database.find_access()


# --- decisions ----------------------------------------------------------------------------------------------------


def _decide(
    c: Connection,
    *,
    host: int | None,
    state: State,
    hw_id: str,
    workload: Workload,
    mode: str,
    length_range: LengthRange,
    fingerprint_id: int | None,
    arm_id: int,
    baseline_id: int,
    race_id: int | None,
    verdict_id: int | None,
    entrants: Sequence[str],
    reason: str,
    idempotency_key: str,
    proofs: Iterable[int],
    serves: bool = True,
    stale: str = "",
) -> int:
    """Append a decision and let it serve instead of every row of its bucket that it overlaps."""
    key = serving_key(hw_id, mode, workload.bucket, length_range)
    served = rows.of_bucket(c, hw_id, mode, workload.bucket)
    rivals = [s for s in served if overlap(s.decision.length_range, length_range)]
    made = rows.insert(
        c,
        t.decisions,
        key=key,
        state=state,
        hw_id=hw_id,
        op=workload.op,
        bucket=workload.bucket,
        mode=mode,
        length_from=length_range[0] if length_range else None,
        length_to=length_range[1] if length_range else None,
        workload_id=rows.put_workload(c, workload),
        fingerprint_id=fingerprint_id,
        arm_id=arm_id,
        baseline_id=baseline_id,
        race_id=race_id,
        verdict_id=verdict_id,
        previous_id=max((s.decision.id for s in rivals), default=None),
        entrants=json.dumps(list(entrants)),
        reason=reason,
        idempotency_key=idempotency_key,
        created_at=rows.now(),
        host_id=host,
        stale=stale,
    )
    for proof in dict.fromkeys(proofs):
        c.execute(sa.insert(t.decision_parities).values(decision_id=made, parity_id=proof))
    pinned = any(s.decision.state == "pinned" for s in rivals)
    if serves and (state == "pinned" or not pinned):
        rows.serve(c, key, made, [s.key for s in rivals])
    return made


def _baseline_of(_: Connection, found: Stored) -> int:
    return found.baseline_id


def _refuse_unproven(arm: Arm, state: State, parities: Sequence[tuple[Arm, Parity]]) -> None:
    if not any(a.digest == arm.digest and isinstance(p, Passed) for a, p in parities):
        raise ParityError(f"{arm.candidate} has not passed parity: it cannot be {state}")


def _refuse_quarantined(arm: Arm, held: Sequence[Quarantine]) -> None:
    for q in held:
        if q.digest in (arm.digest, arm.build):
            raise LedgerError(
                f"{arm.candidate} is in quarantine: {q.reason}",
                todo=f"{release_command([q.id])} if you know better",
            )


def _renewed(c: Connection, host: int, found: Stored, arms: tuple[int, int], proof: int, why: str, key: str) -> int:
    """Return the decision with its current arms, and the proof of one of them."""
    reason = f"proven again, and served until it is raced again: {why}"
    arm_id, baseline_id = arms
    state = found.decision.state
    found = replace(found, baseline_id=baseline_id)
    return _follow(c, host, found, state=state, arm_id=arm_id, reason=reason, key=key, proof=proof, stale=why)


def _follow(
    c: Connection,
    host: int,
    found: Stored,
    *,
    state: State,
    arm_id: int,
    reason: str,
    key: str,
    proof: int | None = None,
    stale: str | None = None,
) -> int:
    """Append a decision for the same key with the same evidence, and one more proof if given, and let it serve. It
    inherits the staleness of the decision that it follows, unless `stale` is given."""
    d = found.decision
    now = rows.at_key(c, found.key)
    known = _by_idempotency(c, key)
    if known is not None:
        return known
    made = rows.insert(
        c,
        t.decisions,
        key=found.key,
        state=state,
        hw_id=d.hw_id,
        op=d.op,
        bucket=d.bucket,
        mode=d.mode,
        length_from=d.length_range[0] if d.length_range else None,
        length_to=d.length_range[1] if d.length_range else None,
        workload_id=found.workload_id,
        fingerprint_id=found.fingerprint_id,
        arm_id=arm_id,
        baseline_id=found.baseline_id,
        race_id=found.race_id,
        verdict_id=found.verdict_id,
        previous_id=now.decision.id if now else found.decision.id,
        entrants=json.dumps(list(found.entrants)),
        reason=reason,
        idempotency_key=key,
        created_at=rows.now(),
        host_id=host,
        stale=d.stale if stale is None else stale,
    )
    proofs = t.decision_parities.c
    known_proofs = c.execute(sa.select(proofs.parity_id).where(proofs.decision_id == d.id)).scalars().all()
    for each in dict.fromkeys([*known_proofs, *([proof] if proof is not None else [])]):
        c.execute(sa.insert(t.decision_parities).values(decision_id=made, parity_id=each))
    rows.serve(c, found.key, made)
    return made


_KNOWN = sa.select(t.decisions.c.id).where(t.decisions.c.idempotency_key == sa.bindparam("of"))


def _by_idempotency(c: Connection, key: str) -> int | None:
    found = c.execute(_KNOWN, {"of": key}).scalar()
    return int(found) if found is not None else None


def _still_holds(found: Stored, now: set[str]) -> bool:
    d = found.decision
    if not found.usable:
        return False
    if d.baseline.digest not in now or d.arm.digest not in now:
        return False
    if d.state == "pinned":
        return True
    undecided = d.verdict is not None and d.verdict.outcome == "undecided"
    return not undecided and not d.stale and now <= set(found.entrants)


def _hold(
    c: Connection,
    host: int,
    arm: Arm,
    digest: str,
    hw_id: str,
    op: str,
    cause: str,
    reason: str,
    evidence: Mapping[str, Any],
    driver: str = "",
) -> int:
    """Quarantine a build; the baseline serves in its place."""
    made = containment.put_quarantine(
        c, arm, digest=digest, hw_id=hw_id, op=op, driver=driver, cause=cause, reason=reason, evidence=evidence
    )
    here = sa.and_(t.decisions.c.hw_id == hw_id, t.decisions.c.op == op)
    for s in rows.fetch(c, rows.stored(serving=True).where(here)):
        same = s.decision.arm.candidate == arm.candidate and s.decision.arm.build == arm.build
        if same and s.arm_id != s.baseline_id:
            key = f"quarantine-{made}-{s.decision.id}"
            _follow(c, host, s, state="quarantined", arm_id=s.baseline_id, reason=reason, key=key)
    return made


def _whole(found: Sequence[Decision]) -> bool:
    """Return True if the rows of a bucket serve all its lengths. A tune may have been killed between two parts."""
    if any(d.length_range is None for d in found) or not found:
        return True
    free, top = length_bucket(found[0].workload["L"])
    for low, high in sorted(d.length_range for d in found if d.length_range):
        if low > free:
            return False
        free = high + 1
    return free > top


# --- evidence -----------------------------------------------------------------------------------------------------


def _proofs(c: Connection, decision_id: int) -> list[tuple[Arm, Parity]]:
    p = t.parities.c
    query = (
        sa.select(t.candidates.c.document.label("arm"), p.outcome, p.document)
        .select_from(t.decision_parities)
        .join(t.parities, t.decision_parities.c.parity_id == p.id)
        .join(t.candidates, p.candidate_id == t.candidates.c.id)
        .where(t.decision_parities.c.decision_id == decision_id)
        .order_by(p.id)
    )
    return [(rows.value_of(Arm, r.arm), rows.parity_of(r.outcome, r.document)) for r in c.execute(query)]


def _document(c: Connection, table: sa.Table, row_id: int | None) -> Any:
    if row_id is None:
        return None
    return c.execute(sa.select(table.c.document).where(table.c.id == row_id)).scalar()


_SPENT = sa.select(sa.func.coalesce(sa.func.sum(t.debits.c.amount), 0.0)).where(t.debits.c.key == sa.bindparam("of"))
_DEBIT = sa.insert(t.debits).from_select(  # checked and debited in one statement
    ["key", "amount", "reason", "created_at"],
    sa.select(
        sa.bindparam("of", type_=sa.Text),
        sa.bindparam("more", type_=sa.Float),
        sa.bindparam("why", type_=sa.Text),
        sa.bindparam("at", type_=sa.Text),
    ).where(_SPENT.scalar_subquery() + sa.bindparam("more", type_=sa.Float) <= sa.bindparam("most", type_=sa.Float)),
)


def _spent(c: Connection, key: str) -> float:
    return float(c.execute(_SPENT, {"of": key}).scalar_one())


# --- import -------------------------------------------------------------------------------------------------------


def _refusal(c: Connection, d: Decision, hw_id: str) -> str:
    """Return why an imported decision may not serve here, or ""."""
    if d.hw_id != hw_id:
        return f"measured on another device ({d.hw_id[:12]}, this is {hw_id[:12]})"
    for recipe in (d.arm.recipe, d.baseline.recipe):
        if isinstance(recipe, PythonRecipe) and (recipe.path or not recipe.target.startswith("autosel.")):
            return f"it would import {recipe.target}: race that candidate here instead"
        if isinstance(recipe, NativeRecipe) and (recipe.source.startswith("/") or ".." in Path(recipe.source).parts):
            return f"its source {recipe.source} is not one of autosel's"
    if any(arm.build and not re.fullmatch("[0-9a-f]{64}", arm.build) for arm in (d.arm, d.baseline)):
        return "its build is not named by a digest"  # but possibly by a path
    if any(q.digest in (d.arm.digest, d.arm.build) for q in containment.active(c, d.hw_id, d.op)):
        return f"{d.arm.candidate} is in quarantine here"
    now = rows.of_bucket(c, d.hw_id, d.mode, d.bucket)
    if any(s.decision.state == "pinned" for s in now):
        return "a pin holds its key here"
    return ""


def _import_one(c: Connection, owner: int | None, d: Decision, digest: str, *, serves: bool) -> int:
    key = f"import-{digest}-{d.id}"
    known = _by_idempotency(c, key)
    if known is not None:
        return known
    return _decide(
        c,
        host=owner,
        state=d.state,
        hw_id=d.hw_id,
        workload=d.workload,
        mode=d.mode,
        length_range=d.length_range,
        fingerprint_id=None,
        arm_id=rows.put_arm(c, d.arm),
        baseline_id=rows.put_arm(c, d.baseline),
        race_id=None,
        verdict_id=rows.put_verdict(c, None, d.verdict) if d.verdict else None,
        entrants=sorted({d.arm.digest, d.baseline.digest}),
        reason=f"imported (decision {d.id} of another ledger): {d.reason}",
        idempotency_key=key,
        proofs=(),
        serves=serves,
        stale=d.stale,
    )


__all__ = ["Evidence", "Ledger", "Served", "budget_key", "open_ledger"]
