"""Measure one run and issue its certificate: what `run` does, and `verify --rerun` does again.

request -> foreseen -> weights -> measured -> grounds (what the ledger knows) -> certificate -> a file's next line
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autosel import fingerprint, settings
from autosel.certify import issue, sign, store
from autosel.certify.certificate import Certificate
from autosel.certify.derive import wrong_tokens
from autosel.certify.evidence import Grounds, gather
from autosel.certify.forecast import forecast
from autosel.certify.slo import MissedObjective, Objective, refuse_missed
from autosel.decode.measure import measure, refuse
from autosel.decode.prompt import prompts
from autosel.decode.run import DecodeRun, Plan, Text
from autosel.decode.weights import load_weights, refuse_unloadable
from autosel.errors import AutoselError, ParityError
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.models.workloads import of_prompt

LONG_PROMPT_S = 20.0

Stage = tuple[str, str]  # of which run ("" where there is but one), and its name


class Listener(Protocol):
    """Who wants to know how a run goes."""

    def stage(self, name: str, detail: str, done: int, total: int, of: str = "") -> None:
        """`of` is the run, where this is a stage of one of many."""

    def expect(self, foreseen: Mapping[Stage, float]) -> None:
        """What comes, in its order, and the seconds that it will take."""

    def note(self, text: str) -> None:
        """What is worth knowing before minutes have passed."""


class Within:
    """A listener for one run of many: what that run is at is a stage of it."""

    def __init__(self, listener: Listener, title: str) -> None:
        self.listener, self.title = listener, title

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        self.listener.stage(name, detail, done, total, of=self.title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run to certify. Raises UsageError or BadConfig for one that cannot be, before anything is loaded."""

    plan: Plan
    repro_cmd: str
    text: Text | None = None  # to score
    objectives: Sequence[Objective] = ()
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        refuse(self.plan)
        prompts(self.plan)
        refuse_unloadable(self.plan)


def certify(request: Request, ledger: Ledger | None, listener: Listener) -> Certificate:
    """Measure, baseline and optimised steps in turn, and issue the certificate; it is in no file yet.

    The ledger says who takes the whole step, and what the decisions rest on; without one the step is raced for this run
    alone, and no proof is known. Raises ImpossibleRun.
    """
    plan = request.plan
    seconds = foreseen(plan, listener, request.text)
    if told := of_long_prompt(plan, seconds.get("prefill", 0.0), ledger):
        listener.note(told)
    listener.expect({("", stage): s for stage, s in seconds.items()})
    run = measure(plan, load_weights(plan, listener), text=request.text, listener=listener, ledger=ledger)
    stated = issue.Request(
        repro_cmd=request.repro_cmd, objectives=request.objectives, price_per_hour=request.price_per_hour
    )
    return issue.issue(run, grounds(run, ledger), stated)


def foreseen(plan: Plan, listener: Listener, text: Text | None = None, *, loads: bool = True) -> dict[str, float]:
    """Return the seconds of each stage."""
    listener.stage("fingerprint", plan.device, 0, 1)
    return forecast(plan, fingerprint.take(plan.device), text, loads=loads)


def of_long_prompt(plan: Plan, seconds: float, ledger: Ledger | None) -> str:
    """Say how to do without a prompt that takes most of a run's time, or with less; empty for any other."""
    if seconds <= LONG_PROMPT_S:
        return ""
    told = (
        f"both arms run the prompt of {plan.seq - 1} tokens, for the time to the first token: about {seconds:.0f} "
        "s; --prompt synthetic fills the cache at random instead, and says so"
    )
    if ledger is not None and (left := _undecided_of_prompt(plan, ledger)):
        told += f"; {left} of its ops are not decided: {settings.spelling()} tune --prompt {plan.seq - 1} does that"
    return told


def _undecided_of_prompt(plan: Plan, ledger: Ledger) -> int:
    """Count the workloads of the prompt that PyTorch serves for want of a decision."""
    hw_id, mode = fingerprint.take(plan.device).hw_id, current_mode()
    asked = {w.bucket for w in of_prompt(plan.shape, plan.seq - 1, batch=plan.batch, dtype=plan.dtype)}
    return sum(not ledger.serving_rows(hw_id, bucket, mode) for bucket in asked)


def grounds(run: DecodeRun, ledger: Ledger | None) -> dict[int, Grounds]:
    """Return what the ledger knows of the decisions that served."""
    return gather(ledger, [choice.decision_id for choice in run.choices]) if ledger is not None else {}


# --- what came of it ------------------------------------------------------------------------------------------------


def append(path: Path, made: Certificate, key: Any = None) -> Certificate:
    """Make the certificate the file's next line, signed if there is a key."""

    def next_line(head: store.Head) -> Certificate:
        linked = issue.chained(made, head.lines + 1, head.checksum)
        return sign.sign(linked, key) if key else linked

    return store.append(path, next_line)


def failed(made: Certificate) -> AutoselError | None:
    """Return what of this run is not as it should be: wrong results first, then missed objectives."""
    if not made.verification_ok:
        todo = "the certificate says so too"
        return ParityError("the run was measured and did not verify", why=_unverified(made), todo=todo)
    try:
        refuse_missed(made.slo)
    except MissedObjective as error:
        return error
    return None


def _unverified(made: Certificate) -> str:
    """Say why, the gravest reason alone."""
    v = made.verification
    if not v.max_logit_error <= v.logit_bound:  # NaN too
        return f"logits {v.max_logit_error:.3g} from the reference, {v.logit_bound:.3g} allowed"
    if wrong := wrong_tokens(made):
        return f"{wrong} of {v.tokens_checked} tokens are not the baseline's, though the bound decides them"
    unproven = [label for label, o in made.per_op.items() if o.parity is None and o.baseline not in ("", o.candidate)]
    if unproven:
        return f"no proof of parity is known here for {', '.join(unproven)}"
    return "no token was compared"
