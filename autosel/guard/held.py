"""Arms that may not serve because of a fault that this or another process of this home has seen."""

from __future__ import annotations

from collections.abc import Iterable

from autosel.ledger.faults import Fault
from autosel.values import Decision


class Held:
    """Faults of this device.

    A wrong or raising build is held for all shapes of its op, a slow one for its decision, and a suspect device for
    everything. A fault does not hold a decision made after it, because that decision took it into account.
    """

    def __init__(self, faults: Iterable[Fault] = (), *hw_ids: str) -> None:
        self.faults = {fault.id: fault for fault in faults if fault.decision.hw_id in hw_ids}

    def why(self, d: Decision) -> str:
        """Return why this decision's arm may not serve, or ""."""
        for fault in self.faults.values():
            if d.created_at <= fault.seen_at and _concerns(fault, d):
                return fault.reason
        return ""


def _concerns(fault: Fault, d: Decision) -> bool:
    if fault.cause == "device":
        return True
    f = fault.decision
    same = (d.op, d.arm.candidate, d.arm.build) == (f.op, f.arm.candidate, f.arm.build)
    if fault.cause in ("slow", "unchecked"):
        return same and (d.id, d.bucket, d.mode) == (f.id, f.bucket, f.mode)
    return same
