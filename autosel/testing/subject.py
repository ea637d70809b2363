"""The candidate under test, with its checks and one worker for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autosel import fingerprint, models
from autosel.candidates import registry
from autosel.candidates.base import Candidate, support_of
from autosel.errors import UsageError
from autosel.models.workloads import step as decode_step
from autosel.parity.battery import MANY, STATE
from autosel.parity.check import HABITS, Prover, Step, Terms, torch_threads
from autosel.parity.session import Proof, built
from autosel.values import Accepted, DTypeName, Failed, Workload
from autosel.workers import Exit

IDLE_SHARE = 0.1  # of one core, over IDLE_WINDOW_S
IDLE_WINDOW_S, IDLE_LIMIT_S = 0.1, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The options of the command line. `inputs`: text from which all inputs are drawn."""

    candidate: str
    op: str
    dtypes: tuple[DTypeName, ...]
    model: str
    batch: int
    seq: int
    device: str
    deadline_s: float
    inputs: str

    @property
    def command(self) -> str:
        """Return the command with all options that differ from their defaults."""
        words = ["pytest -p autosel.testing.plugin --pyargs autosel.testing"]
        words += [f"--candidate {self.candidate}", f"--op {self.op}", *(f"--dtype {d}" for d in self.dtypes)]
        for name, value, default in (
            ("model", self.model, MODEL),
            ("batch", self.batch, 1),
            ("seq", self.seq, SEQ),
            ("device", self.device, DEVICE),
        ):
            if value != default:
                words.append(f"--{name} {value}")
        return " ".join(words)


MODEL, SEQ, DEVICE = "llama-8b", 8192, "cpu"
# Evidence that a report prints elsewhere.
TOLD = {"index", "got", "reference", "allowed", "traceback", "stderr", "message", "type"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One pytest item: a step of the proof at one workload."""

    proof: Proof
    step: Step

    @property
    def id(self) -> str:
        w = self.step.workload
        traits = " ".join(f"{n}={v}" for n, v in w.traits)
        return " ".join(part for part in (w.dtype, traits, self.step.name) if part)

    @property
    def kind(self) -> str:
        """Return `hostile`, `habit` (many calls), `size` (full size) or `left` (state after calls)."""
        if self.step.name in (MANY, STATE):
            return "left"
        if self.step.name in HABITS:
            return "habit"
        return "size" if self.step.name == f"at {self.step.workload.shape_text}" else "hostile"


class TestedCandidate:
    """One candidate at the workloads of a model's decode step that it supports."""

    def __init__(self, order: Order) -> None:
        """Find and build the candidate without running it. Raises an AutoselError if that fails."""
        self.order = order
        self.fp = fingerprint.take(order.device)
        self.candidate: Candidate = registry.named(order.op, order.candidate)
        self.rejected: dict[str, str] = {}
        self.proofs = [built(self.candidate, w, self.fp) for w in self._workloads()]
        if not self.proofs:
            reasons = "\n".join(f"{key}: {reason}" for key, reason in self.rejected.items())
            todo = "choose another --model, --dtype, --batch or --seq"
            raise UsageError(f"{self.candidate.name} supports no workload of {order.model}", why=reasons, todo=todo)

    def _workloads(self) -> list[Workload]:
        order, found = self.order, []
        model = models.load(order.model)
        for dtype in order.dtypes or (model.dtype,):
            named = decode_step(model, batch=order.batch, context=order.seq, dtype=dtype, ops=[order.op])
            if not named:
                raise UsageError(f"{order.model} does not run {order.op}", todo="choose another --model")
            for w in (n.workload for n in named):
                support = support_of(self.candidate, w, self.fp)
                if isinstance(support, Accepted):
                    found.append(w)
                else:
                    self.rejected[w.key] = support.reason
        return found

    @cached_property
    def prover(self) -> Prover:
        order = self.order
        terms = Terms(inputs=order.inputs, call_deadline_s=order.deadline_s, device=order.device, traits=True)
        return Prover(self.fp, terms, threads=torch_threads(self.proofs))

    def checks(self) -> list[Check]:
        """Return all checks of parity. Checks that workloads share are listed once."""
        found: dict[str, Check] = {}
        for proof in self.proofs:
            for step in self.prover.steps(proof):
                check = Check(proof=proof, step=step)
                found.setdefault(check.id, check)
        return list(found.values())

    def run(self, check: Check) -> str:
        """Run a check; return a report of its failure for the candidate's author, "" if it passes."""
        found = self.prover.take(check.proof, [check.step])
        return self.told(found, check.step) if isinstance(found, Failed) else ""

    def told(self, failed: Failed, step: Step) -> str:
        again = f'{self.order.command} --case "{step.name}" --inputs {self.order.inputs}'
        lines = [
            f'{self.candidate.name} failed parity (check "{failed.check}", case "{failed.case}")',
            f"  {failed.reason}",
            f"  this case covers: {step.covers}",
        ]
        values = ", ".join(f"{name} {_short(value)}" for name, value in failed.evidence.items() if name not in TOLD)
        lines += [f"  found: {values}"] if values else []
        lines += [f"  reproduce: {again}"]
        for name in ("traceback", "stderr"):
            text = str(failed.evidence.get(name, "")).strip()
            lines += ["", text[-2000:]] if text else []
        return "\n".join(lines)

    # --- containment --------------------------------------------------------------------------------------------------

    def load(self) -> str:
        """Load the candidate in a new worker and do nothing else; return a report if that fails, else ""."""
        self.close()
        nothing = Step(name="load", covers="the import", workload=self.proofs[0].workload, run=lambda *_: None)
        found = self.prover.take(self.proofs[0], [nothing])
        return self.told(found, nothing) if isinstance(found, Failed) else ""

    def restless(self) -> str:
        """Return a report if threads of the candidate keep cores busy after a call, or if the call ends the worker.

        Otherwise return "". Busy threads slow down other kernels.
        """
        plain = next(c for c in self.checks() if c.proof is self.proofs[0])
        wrong = self.run(plain)  # a wrong result fails other items
        session = self.prover.session
        if session is None:
            return wrong
        share, until = 1.0, time.monotonic() + IDLE_LIMIT_S
        while share > IDLE_SHARE and time.monotonic() < until:
            before = _cpu_s(session.worker.pid)
            time.sleep(IDLE_WINDOW_S)
            share = (_cpu_s(session.worker.pid) - before) / IDLE_WINDOW_S
        if share <= IDLE_SHARE:
            return ""
        return f"{self.candidate.name} still keeps {share:.1f} cores busy {IDLE_LIMIT_S:.0f} s after its call"

    def close(self) -> Exit | None:
        """End the worker; return how it ended, or None if none runs."""
        prover: Prover | None = vars(self).pop("prover", None)
        return prover.close() if prover is not None else None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, in steps of 0.01 s."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / 100.0


def of_kind(checks: Sequence[Check], kinds: Sequence[str], case: str) -> list[Check]:
    """Return the items of these kinds; with `case`, only those of that name."""
    return [c for c in checks if c.kind in kinds and case in ("", c.step.name)]
