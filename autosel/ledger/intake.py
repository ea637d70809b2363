"""Move the journal of faults into the ledger: quarantine and demote, with the evidence from the serving process."""

from __future__ import annotations

import logging
from contextlib import suppress

from autosel.errors import AutoselError, BadConfig
from autosel.ledger import faults
from autosel.ledger.commands import Demote, Hold
from autosel.ledger.faults import Fault
from autosel.ledger.local import Ledger
from autosel.ledger.locks import faults_lock

log = logging.getLogger(__name__)


def take_in(ledger: Ledger) -> list[Fault]:
    """Decide every fault of the journal, then remove its file; repeating it has no effect.

    Invalid files are put aside, and faults that cannot be stored stay: neither keeps the ledger from opening.
    """
    if not faults.pending(ledger.home):
        return []
    taken = []
    try:
        with faults_lock(ledger.home):
            for path, found in faults.pending(ledger.home):
                if isinstance(found, BadConfig):
                    log.warning("a fault was put aside: %s", found)
                    with suppress(OSError):
                        path.replace(path.with_suffix(".refused"))
                    continue
                _decide(ledger, found)
                taken.append(found)
                log.warning("a fault in service was recorded: %s %s", found.arm.candidate, found.reason)
                with suppress(OSError):
                    path.unlink()
    except AutoselError as error:
        log.warning("faults in service wait in %s: %s", faults.folder(ledger.home), error)
    return taken


def _decide(ledger: Ledger, fault: Fault) -> None:
    d, arm = fault.decision, fault.arm
    if fault.cause in ("slow", "device"):  # neither proves that the build is wrong
        for row in ledger.serving_rows(d.hw_id, d.bucket, d.mode):
            same = row.arm.digest == arm.digest and row.length_range == d.length_range
            if same and row.created_at <= fault.seen_at:  # a later attempt may have promoted it again
                ledger.write(Demote(decision_id=row.id, reason=fault.reason))
        return
    held = ledger.quarantined(d.hw_id, d.op).values()
    if not any(q.evidence.get("fault") == fault.id for q in held):
        evidence = {**fault.evidence, "fault": fault.id, "workload": fault.workload, "seen_at": fault.seen_at}
        build, cause, reason = arm.build or arm.digest, fault.cause, fault.reason
        ledger.write(Hold(arm=arm, hw_id=d.hw_id, op=d.op, cause=cause, reason=reason, digest=build, evidence=evidence))
