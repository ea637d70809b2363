"""Put a step that faulted in quarantine, so that it is not tried again until a user releases it.

As with ops, a failure counts only if the control, the step op by op, works afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from autosel import settings
from autosel.candidates.control import CONTROL
from autosel.decode.step import Step, fresh_logits
from autosel.errors import DeviceFault, EnvironmentFault, LedgerError, UsageError
from autosel.ledger.commands import Hold
from autosel.ledger.store import Ledger
from autosel.values import Arm, Fingerprint

STEP = "step"  # the op of whole steps in the ledger
WORKED = {CONTROL: "the step op by op worked afterwards"}


@contextmanager
def holding(ledger: Ledger | None, fp: Fingerprint, step: object, digests: Collection[str] = ()) -> Iterator[None]:
    """Put a whole step in quarantine if the device fails while it runs in this context, and raise the fault.

    Raises UsageError if one of the digests is already in quarantine; EnvironmentFault if the control fails too;
    DeviceFault otherwise. An error of the device under a launch (an illegal access, say) counts too, although CUDA
    reports it only at the next call.
    """
    refuse_held(ledger, fp, getattr(step, "candidate", ""), digests)
    try:
        yield
    except (DeviceFault, torch.AcceleratorError) as error:
        arm, control = getattr(step, "arm", None), getattr(step, "ops", None)
        if arm is None or control is None:
            raise
        fault = blame(ledger, fp, control, arm, error)
        if fault is error:
            raise
        raise fault from error


def blame(ledger: Ledger | None, fp: Fingerprint, control: Step, arm: Arm, error: Exception) -> DeviceFault:
    """Return the failure as a fault of the arm, which is put in quarantine if there is a ledger.

    `control` is the step op by op. Raises EnvironmentFault, and records nothing, if it fails right after in this
    process.
    """
    fault = error if isinstance(error, DeviceFault) else _fault(arm, error)
    _require(control, fault)
    if ledger is not None and ledger.writable:
        reason = f"{fault.what}: {fault.why}"
        try:
            ledger.write(
                Hold(arm=fault.arm, hw_id=fp.hw_id, op=fault.op, cause="watchdog", reason=reason, evidence=WORKED)
            )
        except LedgerError as failed:
            fault.add_note(f"{arm.candidate} could not be put in quarantine: {failed.what}")
    return fault


def _fault(arm: Arm, error: Exception) -> DeviceFault:
    todo = "use --step ops: the step then runs op by op"
    return DeviceFault(f"the device failed under {arm.candidate}", why=str(error)[:300], todo=todo, arm=arm, op=STEP)


def _require(control: Step, fault: DeviceFault) -> None:
    """Run the step op by op. Raises EnvironmentFault if it fails or its logits are not finite."""
    try:
        why = "" if torch.isfinite(fresh_logits(control)).all() else "its logits are not finite"
    except RuntimeError as error:  # also torch.AcceleratorError
        why = str(error)[:300]
    if why:
        raise control_fault(f"{why}\n{fault.what}: {fault.why}", fault.arm.candidate) from fault


def control_fault(why: str, failed: str = "") -> EnvironmentFault:
    """Return the fault of a process in which the step op by op fails, after the candidate `failed` did."""
    what = "the step op by op fails" + (f", as {failed} did" if failed else "")
    todo = f"repair the device, check it with `{settings.spelling()} doctor`, then run the command again"
    return EnvironmentFault(what, why=why, todo=todo)


def refuse_held(ledger: Ledger | None, fp: Fingerprint, candidate: str, digests: Collection[str]) -> None:
    """Raise UsageError if one of these digests of the candidate is in quarantine."""
    quarantined = ledger.quarantined(fp.hw_id, STEP) if ledger is not None and digests else {}
    held = next((quarantined[digest] for digest in digests if digest in quarantined), None)
    if held is not None:
        raise UsageError(
            f"{candidate} is in quarantine",
            why=held.reason,
            todo=f"end the quarantine with `{settings.spelling()} db release {held.id}`",
        )
