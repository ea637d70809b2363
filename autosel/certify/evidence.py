"""What the ledger knows about the decisions that served a run: knobs, their proof, and the second fastest candidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autosel.certify.certificate import ArmProof, RunnerUp
from autosel.errors import LedgerError
from autosel.values import Passed, Scalar

if TYPE_CHECKING:
    from autosel.ledger.store import Evidence as Stored
    from autosel.ledger.store import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """The grounds of one decision."""

    knobs: Mapping[str, Scalar]
    baseline: str
    parity: ArmProof | None
    runner_up: RunnerUp | None


def gather(ledger: Ledger, decision_ids: Iterable[int | None]) -> dict[int, Grounds]:
    """Return the grounds by decision. Decisions that this ledger does not have (another wrote the snapshot) are left
    out.
    """
    found = {}
    for number in {n for n in decision_ids if n is not None}:
        try:
            found[number] = _grounds(ledger.evidence(number))
        except LedgerError:
            continue
    return found


def _grounds(stored: Stored) -> Grounds:
    d = stored.decision
    proofs = [p for arm, p in stored.parities if arm.digest == d.arm.digest and isinstance(p, Passed)]
    second = d.next_best
    return Grounds(
        knobs=d.arm.knobs,
        baseline=d.baseline.candidate,
        parity=ArmProof(cases=proofs[-1].cases, worst=proofs[-1].worst, worst_case=proofs[-1].worst_case)
        if proofs
        else None,
        runner_up=RunnerUp(candidate=second[0], ratio=second[1]) if second else None,
    )
