"""Measure one run and issue its certificate: the work of `run`, and of `verify --rerun`.

request -> expected times -> weights -> measured -> grounds (from the ledger) -> certificate -> a file's next line
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autosel import fingerprint, settings
from autosel.certify import issue, sign, store
from autosel.certify.certificate import Certificate
from autosel.certify.derive import lossy, wrong_tokens
from autosel.certify.forecast import forecast
from autosel.certify.limits import limit_of
from autosel.certify.slo import MissedObjective, refuse_missed
from autosel.decode.measure import measure, refuse
from autosel.decode.original import original, refuse_other_original, scored
from autosel.decode.prompt import prompts
from autosel.decode.run import FEWEST_TOKENS, DecodeRun, Plan, Text
from autosel.decode.weights import load_weights, refuse_unloadable
from autosel.errors import AutoselError, ParityError, UsageError
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.models.workloads import of_prompt

LONG_PROMPT_S = 20.0

Stage = tuple[str, str]  # the run ("" if there is only one), and the stage's name


class RunListener(Protocol):
    """Listener of a run's progress."""

    def stage(self, name: str, detail: str, done: int, total: int, of: str = "") -> None:
        """Start or update a stage. `of` names the run if there are several."""

    def expect(self, foreseen: Mapping[Stage, float]) -> None:
        """Set the coming stages in order, with their expected seconds."""

    def note(self, text: str) -> None:
        """Show a text that the user should see at once."""


class Within:
    """Listener for one of several runs: its stages carry the run's title."""

    def __init__(self, listener: RunListener, title: str) -> None:
        self.listener, self.title = listener, title

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        self.listener.stage(name, detail, done, total, of=self.title)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(issue.IssueRequest):
    """A run to certify. Raises UsageError or BadConfig for an impossible one, before anything is loaded."""

    plan: Plan
    text: Text | None = None  # to score
    forced: bool = False  # whole steps race again, whatever is decided
    traced: bool = False  # also time the threads of a step, for a trace
    original: str = ""  # the model that the codes were made from: the format is scored against it

    def __post_init__(self) -> None:
        refuse(self.plan)
        prompts(self.plan)
        refuse_unloadable(self.plan)
        self._refuse_original()

    @property
    def compared_with(self) -> str:
        """Return the original to score the format against: weights that are rounded when loaded have one; else ""."""
        shape = self.plan.shape
        rounded = lossy("", shape.weight, self.plan.weights, shape.stored)
        return self.original or (self.plan.weights if rounded and self.text else "")

    def _refuse_original(self) -> None:
        if self.original and self.text is None:
            raise UsageError("--original needs --quality", why="a text is scored with both", todo="add --quality FILE")
        if self.original and self.plan.weights == "random":
            raise UsageError("--original: random weights have no original", todo="name the weights with --model")
        if self.text is None or not self.compared_with:
            return
        refuse_other_original(self.plan, self.compared_with)
        count = scored(self.text.tokens, self.plan.batch, self.plan.model.max_context)
        if count < FEWEST_TOKENS and limit_of(self.plan.shape.weight) and not self.accept_quality:
            raise UsageError(
                f"{self.text.name}: {count} tokens would be scored against {self.compared_with}",
                why=f"at least {FEWEST_TOKENS} are needed to judge {self.plan.shape.weight}",
                todo="use a longer text, or certify what it shows with --accept-quality",
            )


def certified(request: RunRequest, ledger: Ledger | None, listener: RunListener) -> tuple[Certificate, DecodeRun]:
    """Measure baseline and optimised steps in turn. Return the certificate, which is not yet in a file, and the run.

    The ledger has the form of the whole step and the grounds of decisions. Without one, the step is raced for this run
    only, and no proof is known. Raises ImpossibleRun.
    """
    plan = request.plan
    seconds = foreseen(plan, listener, request.text, compared=bool(request.compared_with))
    if told := of_long_prompt(plan, seconds.get("prefill", 0.0), ledger):
        listener.note(told)
    listener.expect({("", stage): s for stage, s in seconds.items()})
    source, text = request.compared_with, request.text
    known = original(plan, text, source, listener) if source and text else None
    weights = load_weights(plan, listener)
    asked: dict[str, Any] = {"forced": request.forced, "traced": request.traced, "original": known}
    run = measure(plan, weights, text=text, listener=listener, ledger=ledger, **asked)
    return issue.issue(run, grounds(run, ledger), request), run


def foreseen(
    plan: Plan, listener: RunListener, text: Text | None = None, *, loads: bool = True, compared: bool = False
) -> dict[str, float]:
    """Return the expected seconds of each stage."""
    listener.stage("fingerprint", plan.device, 0, 1)
    return forecast(plan, fingerprint.take(plan.device), text, loads=loads, compared=compared)


def of_long_prompt(plan: Plan, seconds: float, ledger: Ledger | None) -> str:
    """Return how to avoid a prompt that takes most of a run's time; "" for any other prompt."""
    if seconds <= LONG_PROMPT_S:
        return ""
    who = "both arms run" if plan.baseline else "the run includes"
    told = (
        f"{who} the prompt of {plan.seq - 1} tokens, for the time to the first token: about {seconds:.0f} "
        "s; --prompt synthetic fills the cache at random instead, and is recorded"
    )
    if ledger is not None and (left := _undecided_of_prompt(plan, ledger)):
        told += f"; {left} of its ops are not decided: run {settings.spelling()} tune --prompt {plan.seq - 1}"
    return told


def _undecided_of_prompt(plan: Plan, ledger: Ledger) -> int:
    """Count the workloads of the prompt that PyTorch serves because they are undecided."""
    hw_id, mode = fingerprint.take(plan.device).hw_id, current_mode()
    asked = {w.bucket for w in of_prompt(plan.shape, plan.seq - 1, batch=plan.batch, dtype=plan.dtype)}
    return sum(not ledger.serving_rows(hw_id, bucket, mode) for bucket in asked)


def grounds(run: DecodeRun, ledger: Ledger | None) -> dict[int, issue.Grounds]:
    """Return the grounds of the decisions that served, from the ledger."""
    return issue.gather(ledger, [choice.decision_id for choice in run.choices]) if ledger is not None else {}


def append(path: Path, made: Certificate, key: Any = None) -> Certificate:
    """Make the certificate the file's next line, signed if there is a key."""

    def next_line(head: store.Head) -> Certificate:
        linked = issue.chained(made, head.lines + 1, head.checksum)
        return sign.sign(linked, key) if key else linked

    return store.append(path, next_line)


def failed(made: Certificate) -> AutoselError | None:
    """Return what is wrong with this run: wrong results first, then missed objectives."""
    if not made.verification_ok:
        todo = "the certificate records this too"
        return ParityError("the run was measured but not verified", why=_unverified(made), todo=todo)
    try:
        refuse_missed(made.slo)
    except MissedObjective as error:
        return error
    return None


def _unverified(made: Certificate) -> str:
    """Return the most serious reason."""
    v = made.verification
    if not v.max_logit_error <= v.logit_bound:  # NaN too
        return f"logits {v.max_logit_error:.3g} from the reference, {v.logit_bound:.3g} allowed"
    if wrong := wrong_tokens(made):
        return f"{wrong} of {v.tokens_checked} tokens are not the baseline's, although the bound decides them"
    unproven = [label for label, o in made.per_op.items() if o.parity is None and o.baseline not in ("", o.candidate)]
    if unproven:
        return f"no proof of parity is known here for {', '.join(unproven)}"
    return "no token was compared"
