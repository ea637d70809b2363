"""Check calls of one served arm, and demote it if a check fails.

A caller gets the candidate's result, but the baseline's for the first calls, and for a checked call with a wrong
result. An error in the guard itself demotes the candidate, but never fails the caller's call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random, SystemRandom
from typing import Any

import torch
from torch import Tensor

from autosel.errors import AutoselError
from autosel.guard.call import CheckedCall, Clock, Kernel, Result, captured
from autosel.guard.detector import MIN_DWELL_S, Detector
from autosel.guard.judge import Judge, WrongResult
from autosel.guard.rate import NEVER, CheckRate, Policy
from autosel.guard.replay import replay
from autosel.guard.spot import Allowance, Spot
from autosel.ledger.faults import Cause, Fault
from autosel.ops.contract import Op
from autosel.ops.stored import tensors
from autosel.values import Decision

log = logging.getLogger(__name__)
MOST_TROUBLES = 3  # failed checks until the baseline serves


def anywhere(_: Sequence[Any]) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is watched: the loaded arm of a decision, and the baseline that replaces it.

    `at_home` tells if arguments are on the decision's device; results elsewhere prove nothing about the arm. `spot`
    recomputes a few elements of a result; None if there is no such check.
    """

    op: Op
    decision: Decision
    candidate: Kernel
    baseline: Kernel
    at_home: Callable[[Sequence[Any]], bool] = anywhere
    spot: Spot | None = None


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True, kw_only=True)
class Watch:
    """Watch of one served arm, shared by threads. `report` handles a fault, and must replace the candidate by the
    baseline.
    """

    subject: Subject
    policy: Policy
    report: Callable[[Fault], None]
    random: Random = field(default_factory=SystemRandom)
    clock: Clock = time.perf_counter_ns
    now: Callable[[], datetime] = utc_now
    rate: CheckRate = field(init=False)
    detector: Detector = field(default_factory=Detector)
    judge: Judge = field(default_factory=Judge)
    fault: Fault | None = None
    troubles: int = 0
    unjudged: int = 0
    allowance: Allowance = field(default_factory=Allowance)  # shared by all watches of a process
    spot_checks: int = 0
    spot_limit: float = 1.0  # a larger ratio is suspicious; increases with each suspicion that the judge clears
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.rate = CheckRate(policy=self.policy, random=self.random, spots=self.subject.spot is not None)

    def gap(self) -> int:
        """Return the number of calls up to the next one that must come here."""
        with self.lock:
            return self.rate.gap() if self.fault is None else NEVER

    def describe(self) -> str:
        d, checks, first = self.detector, self.rate.checks, self.rate.first
        told = f"{checks} of the first {first} calls checked" if self.rate.canary else f"{checks} calls checked"
        if self.rate.spots:
            told += f", a few elements recomputed of {self.spot_checks} more"
        told += f"; slower than the baseline in {d.lost} of {d.pairs}" if d.pairs else ""
        return told if self.rate.canary else f"{told}; {self._now()}"

    def _now(self) -> str:
        """Describe which calls are checked from now on."""
        if self.fault is not None:
            return "no longer checked"
        shadow, spots = self.rate.shadow, self.policy.spot_rate if self.rate.spots else 0.0
        compared = f"1 call in {1 / shadow:,.0f} is compared with the baseline" if shadow else ""
        recomputed = f"1 call in {1 / spots:,.0f} is recomputed in part" if spots else ""
        return f"now {', '.join(filter(None, (compared, recomputed))) or 'no call is checked'}"

    # --- a call that is checked -------------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any], outs: Sequence[Any]) -> Any:
        s = self.subject
        if self.fault is not None:
            return s.baseline(*args, *outs)
        if not self.rate.draws_shadow():
            return self._spotted(args, outs)
        if captured(args):
            return s.candidate(*args, *outs)
        try:
            call = CheckedCall(s.op, args, outs, self.clock)
        except AutoselError:  # outside the contract: the caller is responsible
            return s.candidate(*args, *outs)
        except torch.OutOfMemoryError:  # no memory to copy its operands, so none for the baseline, which needs more
            with self.lock:
                self.rate.checks += 1
            return s.candidate(*args, *outs)
        except Exception as error:
            self._troubled(error)
            return s.baseline(*args, *outs)
        return self._both(call) if s.at_home(args) else s.baseline(*args, *outs)

    def _both(self, call: CheckedCall) -> Any:
        s, start = self.subject, self.clock()
        number, canary, deep = self.rate.checks, self.rate.canary, self.rate.deep
        first = self.random.random() < 0.5
        if first:
            candidate, baseline = call.run(s.candidate), call.run(s.baseline)
        else:
            baseline = call.run(s.baseline)
            candidate = call.run(s.candidate)
        if candidate.error is not None and (candidate.broke or (candidate.own and baseline.error is None)):
            self._raised(candidate.error, call)
        if baseline.error is not None:  # nothing to judge by; the candidate's error, if any, is the caller's
            self._count(candidate, self.clock() - start, first=first)
            return call.serve(candidate)
        if candidate.error is not None:
            return call.serve(baseline)
        try:
            finding = self.judge.look(call, candidate, baseline, self._seed(), deep=deep)
            wrong = finding is not None and self._wrong(call, finding, baseline, number, canary=canary)
        except torch.OutOfMemoryError:  # the serving process leaves little memory, which proves nothing about the arm
            self._count(candidate, self.clock() - start, first=first)
            return call.serve(baseline)
        except Exception as error:
            self._troubled(error)
            return call.serve(baseline)
        if finding is not None:
            if not wrong:
                self.unjudged += 1
                self._count(candidate, self.clock() - start, first=first)
            return call.serve(baseline)
        served = call.serve(baseline if canary else candidate)
        self._account(call, candidate, baseline, self.clock() - start, canary=canary, first=first)
        return served

    # --- a few elements of a call ------------------------------------------------------------------------------------

    def _spotted(self, args: Sequence[Any], outs: Sequence[Any]) -> Any:
        """Serve the candidate's result, and recompute a part of it if the allowance permits."""
        s, spot = self.subject, self.subject.spot
        try:
            result = s.candidate(*args, *outs)
        except Exception as error:
            return self.raised(error, args, outs)
        if spot is None or not self.allowance.may():
            return result
        start = self.clock()
        try:
            ratio = spot(args, self._made(result, outs), self._seed())
        except Exception as error:  # outside the contract, or not readable by the check
            self._unspotted(error)
            return result
        self.spot_checks += 1
        self.allowance.spend(self.clock() - start)
        return result if ratio <= self.spot_limit else self._suspected(args, outs, result, ratio)

    def _made(self, result: Any, outs: Sequence[Any]) -> Sequence[Any]:
        """Return the pure outputs; in-place results are among the arguments."""
        if not outs or outs[0] is not None:
            return outs
        return result if isinstance(result, tuple) else (result,)

    def _unspotted(self, error: Exception) -> None:
        self.troubles += 1
        log.debug("%s could not be spot-checked: %s", self._name, error)
        if self.troubles >= MOST_TROUBLES:
            self.troubles, self.rate.spots = 0, False

    def _suspected(self, args: Sequence[Any], outs: Sequence[Any], result: Any, ratio: float) -> Any:
        """Judge a result that a spot check suspects, before anything else runs."""
        s = self.subject
        if _overlap(args, outs):  # an operand is overwritten, so every such check would suspect its result
            self.rate.spots = False
            return result
        try:
            call = CheckedCall(s.op, args, outs, self.clock)
            if not s.at_home(args):
                return result
            served = call.taken(s.candidate, result)
            baseline = call.run(s.baseline)
            if baseline.error is not None:
                return result
            finding = self.judge.look(call, served, baseline, self._seed(), deep=True)
            if finding is not None and self._wrong(call, finding, baseline, self.rate.checks, canary=False):
                return call.serve(baseline)
        except AutoselError:  # outside the contract
            return result
        except Exception as error:
            self._troubled(error)
            return result
        self.spot_limit = max(self.spot_limit, 2 * ratio)
        return call.serve(served)

    def _seed(self) -> int:
        return self.random.getrandbits(31)

    def _count(self, candidate: Result, took_ns: int, *, first: bool) -> None:
        """Count a check without a result, so that not every call is checked again for ever if memory is short or
        nothing can judge.
        """
        with self.lock:
            self.rate.checked(candidate.ns, max(0, took_ns - candidate.ns), natural=first)

    def _account(
        self, call: CheckedCall, candidate: Result, baseline: Result, took_ns: int, *, canary: bool, first: bool
    ) -> None:
        """Record the check's cost and, after the first calls, which arm was faster. `first` means that the candidate
        ran first.
        """
        self._count(candidate, took_ns, first=first)
        if canary or self.subject.decision.state == "pinned":  # a pinned arm serves at any speed
            return
        with self.lock:
            self.detector.add(candidate.raced_ns > baseline.raced_ns)
            if not self.detector.alarm or self._dwelt_s() < MIN_DWELL_S:
                return
            d = self.detector
        reason = f"slower than the baseline in service: lost {d.lost} of {d.pairs} shadow pairs"
        last_ns = [candidate.raced_ns, baseline.raced_ns]
        evidence = {"lost": d.lost, "pairs": d.pairs, "detector": d.value, "last_ns": last_ns}
        self._report("slow", reason, call.workload.key, evidence)

    def _dwelt_s(self) -> float:
        try:
            since = datetime.fromisoformat(self.subject.decision.created_at)
        except ValueError:
            return MIN_DWELL_S
        since = since if since.tzinfo else since.replace(tzinfo=UTC)
        return (self.now() - since).total_seconds()

    # --- wrong ------------------------------------------------------------------------------------------------------

    def _wrong(self, call: CheckedCall, finding: WrongResult, baseline: Result, number: int, *, canary: bool) -> bool:
        """Find the cause and report it; return False if the fault cannot be judged."""
        again = replay(call, finding, self.subject.candidate, baseline)
        mismatch = finding.mismatch
        if again.cause == "unjudged":
            if not self.unjudged:
                log.warning("%s cannot be judged on %s: %s", self._name, call.workload.key, again.words)
            return False
        reason = f"wrong in service: {mismatch.check}: {mismatch.reason}; {again.words}"
        evidence = {
            "check": mismatch.check,
            **dict(mismatch.evidence),
            **again.evidence,
            "checks_before": number,
            "canary": canary,
        }
        self._report(again.cause, reason, call.workload.key, evidence)
        return True

    # --- raised -----------------------------------------------------------------------------------------------------

    def raised(self, error: Exception, args: Sequence[Any], outs: Sequence[Any]) -> Any:
        """Return the baseline's result after the candidate raised on an unchecked call.

        Raises the candidate's error if the baseline raises too or cannot run.
        """
        s = self.subject
        if self.fault is not None:
            return s.baseline(*args, *outs)
        try:
            w = s.op.workload_of({a.name: value for a, value in zip(s.op.args, args, strict=True)})
        except AutoselError:
            raise error from None
        if _overlap(args, outs):  # the candidate may have overwritten operands of the baseline
            raise error
        try:
            result = s.baseline(*args, *outs)
        except Exception:
            raise error from None
        if w.bucket == s.decision.bucket and s.at_home(args) and not _out_of_memory(error):
            self._blame(error, w.key)
        return result

    def _raised(self, error: Exception, call: CheckedCall) -> None:
        if call.workload.bucket == self.subject.decision.bucket and not _out_of_memory(error):
            self._blame(error, call.workload.key)

    def _blame(self, error: Exception, workload: str) -> None:
        first = (str(error) or "no message").splitlines()[0]
        evidence = {"error": type(error).__name__, "message": str(error)[:2000]}
        self._report("raised", f"raised in service: {type(error).__name__}: {first:.200}", workload, evidence)

    # --- errors of the guard ----------------------------------------------------------------------------------------

    def _troubled(self, error: Exception) -> None:
        self.troubles += 1
        log.warning("%s could not be checked: %s: %s", self._name, type(error).__name__, error, exc_info=error)
        if self.troubles >= MOST_TROUBLES:
            reason = f"cannot be checked here: {type(error).__name__}: {str(error)[:200]}"
            self._report("unchecked", reason, self.subject.decision.workload.key, {})

    # --- reporting --------------------------------------------------------------------------------------------------

    def _report(self, cause: Cause, reason: str, workload: str, evidence: dict[str, Any]) -> None:
        with self.lock:
            if self.fault is not None:
                return
            self.fault = Fault(
                cause=cause,
                reason=reason,
                decision=self.subject.decision,
                workload=workload,
                evidence=evidence,
                seen_at=self.now().isoformat(timespec="microseconds"),
            )
        self.report(self.fault)

    @property
    def _name(self) -> str:
        return self.subject.decision.arm.candidate


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _overlap(args: Sequence[Any], outs: Sequence[Any]) -> bool:
    """Return True if an output shares memory with an argument."""
    written = [_span(o) for o in outs if isinstance(o, Tensor)]
    read = [_span(tensor) for a in args for tensor in tensors(a)]
    return any(w[0] < r[1] and r[0] < w[1] for w in written for r in read)


def _span(t: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()
