"""A whole step that faulted is put in quarantine, and not tried again there until somebody releases it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from autosel import settings
from autosel.errors import DeviceFault, LedgerError, UsageError
from autosel.ledger.store import Ledger
from autosel.values import Arm, Fingerprint

STEP = "step"  # the op under which whole steps are filed


@contextmanager
def holding(ledger: Ledger | None, fp: Fingerprint, step: object) -> Iterator[None]:
    """What faults in here is put in quarantine, where there is a ledger to say so, and the fault goes on.

    Raises DeviceFault, also for an error of the device's own under a launch (an illegal access, say): whoever calls
    CUDA next is told of it.
    """
    try:
        with _blaming(getattr(step, "arm", None)):
            yield
    except DeviceFault as fault:
        if ledger is not None and ledger.writable:
            reason = f"{fault.what}: {fault.why}"
            try:
                ledger.quarantine(fault.arm, hw_id=fp.hw_id, op=fault.op, cause="watchdog", reason=reason)
            except LedgerError as error:
                fault.add_note(f"it could not be put in quarantine: {error.what}")
        raise


@contextmanager
def _blaming(arm: Arm | None) -> Iterator[None]:
    try:
        yield
    except torch.AcceleratorError as error:
        if arm is None:
            raise
        todo = "use --no-persistent: the step then runs op by op"
        what = f"the device failed under {arm.candidate}"
        raise DeviceFault(what, why=str(error)[:300], todo=todo, arm=arm, op=STEP) from error


def refuse_held(ledger: Ledger | None, fp: Fingerprint, candidate: str, digests: Collection[str]) -> None:
    """Raise UsageError if one of these digests of the candidate is in quarantine."""
    quarantined = ledger.quarantined(fp.hw_id, STEP) if ledger is not None else {}
    held = next((quarantined[digest] for digest in digests if digest in quarantined), None)
    if held is not None:
        raise UsageError(
            f"{candidate} is in quarantine",
            why=held.reason,
            todo=f"{settings.spelling()} db release {held.id} lets it run again",
        )
