"""Finish proofs: `tune` runs the first rows of an op's array within its budget; the daemon runs the others while idle.

The rows use the inputs of the earlier proof. An arm that fails a row is quarantined, and the baseline serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autosel import fingerprint
from autosel.candidates import registry
from autosel.ledger.commands import Hold, SaveParity
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.parity.check import Terms, check_rest
from autosel.parity.session import nursery
from autosel.tuning.job import Stages
from autosel.tuning.prove import on_trial, proof_of_raced
from autosel.values import Decision, Failed, Fingerprint, Passed
from autosel.workers.nursery import Nursery

AT_ONCE = 8  # decisions in one run; then a tune may use the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Result of a finished proof. `reason`: why its arm is quarantined; empty if it passed."""

    decision: Decision
    rows: int
    reason: str


def complete(ledger: Ledger, fp: Fingerprint, stages: Stages, *, device: str = "cpu") -> Iterator[Completion]:
    """Complete the proofs of at most AT_ONCE serving arms: run the array rows that `tune` left out.

    Raises LedgerError if another process measures on the device.
    """
    with ledger.lock(fp.hw_id, fingerprint.unit(device)), nursery() as workers:
        left = ledger.incomplete(fp.hw_id, current_mode())[:AT_ONCE]
        for done, (decision, known) in enumerate(left):
            stages.stage("parity", f"completing the proof of {decision.arm.candidate}", done, len(left))
            found = _rest(ledger, fp, decision, known, device, workers)
            ledger.write(SaveParity(hw_id=fp.hw_id, workload=decision.workload, arm=decision.arm, parity=found))
            reason = ""
            if isinstance(found, Failed):
                reason = f"parity: {found.check} ({found.case}): {found.reason}"
                _hold(ledger, decision, found, reason)
            yield Completion(decision=decision, rows=known.pairs_of - known.pairs, reason=reason)


def _rest(
    ledger: Ledger, fp: Fingerprint, d: Decision, known: Passed, device: str, workers: Nursery
) -> Passed | Failed:
    terms = Terms(inputs=known.inputs, pairs=range(known.pairs, known.pairs_of), device=device)
    proof = proof_of_raced(registry.find(d.op, d.arm.candidate), d.arm, d.workload)
    with on_trial(ledger, fp.hw_id, d.op, d.arm):
        return check_rest(proof, known, fp=fp, terms=terms, nursery=workers)


def _hold(ledger: Ledger, d: Decision, failed: Failed, reason: str) -> None:
    ledger.write(
        Hold(
            arm=d.arm,
            hw_id=d.hw_id,
            op=d.op,
            cause="parity",
            reason=reason,
            digest=d.arm.build or d.arm.digest,
            evidence={**failed.evidence, "check": failed.check, "case": failed.case},
        )
    )
