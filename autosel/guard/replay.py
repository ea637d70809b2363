"""Find the cause of a fault: run both arms again on the inputs of the call that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from autosel.guard.call import CheckedCall, Kernel, Result
from autosel.guard.judge import WrongResult

REPLAYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of the replays.

    kernel: the candidate is wrong each time. race: it is not, so its threads or its timing are suspected. device: the
    baseline is sometimes wrong and sometimes right on the same inputs. unjudged: the baseline also fails each time, so
    the inputs are outside the bound's range.
    """

    cause: Literal["kernel", "race", "device", "unjudged"]
    candidate_wrong: int
    baseline_wrong: int

    @property
    def words(self) -> str:
        told = f"wrong in {self.candidate_wrong} of {REPLAYS} replays"
        return {
            "kernel": f"{told}: the kernel",
            "race": f"{told}: a race is suspected",
            "device": f"the baseline was wrong in {self.baseline_wrong} of {REPLAYS + 1} runs: the device is suspect",
            "unjudged": "the baseline fails the same check",
        }[self.cause]

    @property
    def evidence(self) -> dict[str, Any]:
        return {
            "replays": REPLAYS,
            "candidate_wrong": self.candidate_wrong,
            "baseline_runs": REPLAYS + 1,
            "baseline_wrong": self.baseline_wrong,
        }


def replay(call: CheckedCall, finding: WrongResult, candidate: Kernel, baseline: Result) -> Replay:
    again = [call.run(candidate) for _ in range(REPLAYS)]
    if any(result.broke for result in again):  # that device does not answer any more
        failed = sum(result.error is not None for result in again)
        return Replay(cause="kernel", candidate_wrong=failed, baseline_wrong=0)
    witness = [baseline, *(call.run(baseline.arm) for _ in range(REPLAYS))]
    wrong = sum(_fails(call, finding, result, baseline) for result in again)
    baseline_wrong = sum(_fails(call, finding, result, baseline) for result in witness)
    if 0 < baseline_wrong < len(witness):
        cause: Literal["kernel", "race", "device", "unjudged"] = "device"
    elif baseline_wrong:
        cause = "unjudged"
    else:
        cause = "kernel" if wrong == REPLAYS else "race"
    return Replay(cause=cause, candidate_wrong=wrong, baseline_wrong=baseline_wrong)


def _fails(call: CheckedCall, finding: WrongResult, result: Result, baseline: Result) -> bool:
    """Return True if the result fails the finding's check. Raises OutOfMemoryError for a run without memory: it proves
    nothing.
    """
    if isinstance(result.error, torch.OutOfMemoryError):
        raise result.error
    if result.error is not None or result.spoilt:
        return True
    formed = call.same_form(result.outputs, baseline.outputs) is None
    with torch.device("cpu"):  # as for the judge
        return not formed or finding.check(result.outputs) is not None
