"""Prove stale winners again after a change of driver, library or kernel source.

Those that pass serve, marked as stale, until they race again; the baseline replaces the others. The proof of a compiled
arm uses the build that was raced, even if its source has changed. The proof of a Python arm uses its current imports.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autosel.candidates import registry, validity
from autosel.candidates.base import Candidate, support_of
from autosel.errors import AutoselError, LedgerError, UnknownName
from autosel.ledger.commands import Renew
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.parity.check import Terms, check_all
from autosel.parity.session import nursery
from autosel.tuning.job import Stages, Tuning
from autosel.tuning.prove import on_trial, proof_of_raced
from autosel.tuning.shortlist import way_of
from autosel.values import SERVING, WHOLE_STEP, Accepted, Arm, Decision, Failed, Fingerprint, Parity
from autosel.workers.nursery import Nursery

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Result for a stale decision: the new `decision` that serves, or the `reason` why the baseline serves."""

    stale: Decision
    decision: Decision | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Old:
    """A stale decision, the reason, and the current versions of its arms."""

    decision: Decision
    why: str
    candidate: Candidate
    arm: Arm
    baseline: Arm


def outdated(decisions: Iterable[Decision], hw_id: str, mode: str) -> list[Decision]:
    """Return the decisions of this device and mode with a winner that is stale.

    Whole steps are left out: the decoder proves them with the model's weights.
    """
    here = [d for d in decisions if (d.hw_id, d.mode) == (hw_id, mode) and d.state in SERVING and d.op != WHOLE_STEP]
    return [d for d in here if d.arm.digest != d.baseline.digest and validity.staleness(d)]


def renew(
    ledger: Ledger,
    fp: Fingerprint,
    stages: Stages,
    *,
    device: str = "cpu",
    buckets: Collection[str] | None = None,
) -> Iterator[Renewal]:
    """Prove stale winners again, by default in every bucket, with all winners of one build in one process.

    The caller must hold the device (`Ledger.lock`).
    """
    served = [s.decision for s in ledger.serving() if buckets is None or s.decision.bucket in buckets]
    groups: dict[str, list[_Old]] = {}
    stale = outdated(served, fp.hw_id, current_mode())
    for d in stale:
        try:
            old = _as_now(ledger, fp, d)
        except AutoselError as error:
            yield Renewal(stale=d, decision=None, reason=error.what)
            continue
        groups.setdefault(old.arm.build or old.arm.backend, []).append(old)
    done = 0
    with nursery() as workers:
        for group in groups.values():
            stages.stage("parity", f"proving {group[0].arm.candidate} again", done, len(stale))
            for old, parity in zip(group, _proofs(ledger, fp, group, device, workers), strict=True):
                done += 1
                yield _renewal(ledger, old, parity)


def serve_meanwhile(tuning: Tuning) -> None:
    """Prove stale winners of a tune's buckets again, so that they serve while it measures."""
    buckets = {named.workload.bucket for named in tuning.request.workloads}
    for done in renew(tuning.ledger, tuning.fp, tuning.tally, device=tuning.request.device, buckets=buckets):
        if tuning.over:
            return
        if done.reason:
            log.warning("decision %d is stale, so the baseline serves: %s", done.stale.id, done.reason)
        else:
            log.info("decision %d is stale; its arm passed parity again and serves until the next race", done.stale.id)


def _as_now(ledger: Ledger, fp: Fingerprint, d: Decision) -> _Old:
    """Return the current versions of a decision's arms. Raises AutoselError if its winner can or may not run here."""
    try:
        candidate = registry.find(d.op, d.arm.candidate)
    except UnknownName as error:
        raise AutoselError(f"candidate {d.arm.candidate} no longer exists") from error
    support = support_of(candidate, d.workload, fp)
    if not isinstance(support, Accepted):
        raise AutoselError(f"{d.arm.candidate} can no longer run here: {support.reason}")
    arm = validity.as_now(d.arm)
    if ledger.quarantined(fp.hw_id, d.op).keys() & {arm.digest, arm.build}:
        raise AutoselError(f"{d.arm.candidate} is in quarantine")
    baseline = way_of(registry.baseline(d.op), d.workload, fp).arm
    return _Old(decision=d, why=_change(d), candidate=candidate, arm=arm, baseline=baseline)


def _change(d: Decision) -> str:
    """Return the change that made a decision stale, without the decision's number: the renewed one has another."""
    return validity.staleness(d).partition(" is stale: ")[2]


def _proofs(ledger: Ledger, fp: Fingerprint, group: Sequence[_Old], device: str, workers: Nursery) -> list[Parity]:
    proofs = [proof_of_raced(old.candidate, old.arm, old.decision.workload) for old in group]
    with on_trial(ledger, fp.hw_id, group[0].decision.op, group[0].arm):
        return check_all(proofs, fp=fp, terms=Terms(device=device), nursery=workers)


def _renewal(ledger: Ledger, old: _Old, parity: Parity) -> Renewal:
    try:
        made = ledger.write(
            Renew(decision_id=old.decision.id, arm=old.arm, baseline=old.baseline, parity=parity, why=old.why)
        )
    except LedgerError as error:
        return Renewal(stale=old.decision, decision=None, reason=error.what)
    if made is not None:
        return Renewal(stale=old.decision, decision=made, reason="")
    failed = f"parity: {parity.check}: {parity.reason}" if isinstance(parity, Failed) else "another decision serves"
    return Renewal(stale=old.decision, decision=None, reason=failed)
