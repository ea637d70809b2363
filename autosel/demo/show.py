"""The flow of the demo. `show` tells the whole story, as `pipeline.tune` does for tuning.

request -> the model's folder -> decisions -> both arms timed in turn -> certificate -> both arms' own answers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from autosel import devices, dispatch, fingerprint, models, pipeline, settings
from autosel.certify import issue, run
from autosel.certify.certificate import Certificate
from autosel.certify.command import command
from autosel.decode.measure import measure
from autosel.decode.prompt import prompts
from autosel.decode.run import Chosen, Plan
from autosel.decode.weights import Weights, load_weights, refuse_unloadable
from autosel.demo.answer import Answer, Difference, by_autosel, by_pytorch, difference, reference
from autosel.demo.chat import Chat, open_chat, write_prompt
from autosel.demo.fetch import prepare
from autosel.errors import UsageError
from autosel.ledger.store import Ledger
from autosel.models.workloads import Named, step
from autosel.tuning.ended import stoppable

QUESTION = "Explain in three sentences why the sky is blue."
SHORTEST_CONTEXT = 256  # tokens; decisions hold for shorter contexts too
ArmName = Literal["pytorch", "autosel"]


class Working(run.RunListener, pipeline.TuneListener, Protocol):
    """Listener of one part: the fetch, the tune, or the measurement."""


class Screen(Protocol):
    """Display of a demo. Each part has its own listener."""

    def working(self, budget_s: float = 0.0) -> AbstractContextManager[Working]: ...

    def tuned(self, report: pipeline.Report, workloads: Sequence[Named]) -> None: ...

    def answering(self, arm: ArmName, made: Certificate) -> None:
        """Start an arm's answer, whose speed is already measured."""

    def heard(self, text: str) -> None:
        """Show the answer so far, after each token."""

    def answered(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """A demo. `tokens` limits the answer, and is the number of timed steps. Raises UsageError.

    `again` is the command that continues a stopped demo.
    """

    question: str = QUESTION
    tokens: int = 100
    budget_s: float = 300.0  # of the tune; 0: no limit
    device: str = "cpu"
    wheelhouse: Path | None = None
    certificates: Path
    again: str = ""

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise UsageError("the question is empty", todo=f'ask something:  {settings.spelling()} demo "{QUESTION}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Result of a demo. `differs` is None if both arms wrote the same tokens."""

    folder: Path
    question: str
    report: pipeline.Report
    certificate: Certificate
    texts: Mapping[ArmName, str]
    tokens: Mapping[ArmName, list[int]]
    differs: Difference | None


def show(request: DemoRequest, ledger: Ledger, screen: Screen) -> Shown:
    """Fetch and tune the model, time both arms in turn, certify, and let each arm answer the question.

    Each part is kept when it ends: a second demo neither downloads nor tunes. Raises UsageError, AutoselError.
    """
    with screen.working() as listener:
        folder = prepare(request.wheelhouse, listener)
    chat = open_chat(folder)
    plan = _planned(request, folder, chat)
    report = _tuned(plan, request, ledger, screen)
    weights, chosen, made = _certified(plan, request.certificates, ledger, screen)
    answers = _Answers(plan=plan, weights=weights, chat=chat, screen=screen, made=made)
    with dispatch.measuring():
        pytorch, autosel = answers.pytorch(), answers.autosel(chosen)
        differs = difference(pytorch, autosel, lambda count: answers.exact(pytorch.tokens[:count]))
    return Shown(
        folder=folder,
        question=request.question,
        report=report,
        certificate=made,
        texts={"pytorch": chat.text(pytorch.tokens), "autosel": chat.text(autosel.tokens)},
        tokens={"pytorch": pytorch.tokens, "autosel": autosel.tokens},
        differs=differs,
    )


def _planned(request: DemoRequest, folder: Path, chat: Chat) -> Plan:
    """Return the plan of the measurement: the question as prompt, and a step for each token of the answer."""
    model, tokens = models.load(folder), chat.tokens(request.question)
    if len(tokens) + 1 + request.tokens > model.max_context:
        raise UsageError(
            f"question and answer have up to {len(tokens) + 1 + request.tokens} tokens",
            why=f"{model.name} supports contexts of at most {model.max_context}",
            todo="ask a shorter question, or use fewer --tokens",
        )
    plan = Plan(
        model=model,
        weights=str(folder),
        prompt=str(write_prompt(folder.parent, tokens)),
        dtype=model.dtype,
        seq=len(tokens) + 1,
        iters=request.tokens,
        advance=True,
        device=request.device,
    )
    refuse_unloadable(plan)
    return plan


def _tuned(plan: Plan, request: DemoRequest, ledger: Ledger, screen: Screen) -> pipeline.Report:
    """Tune the ops of a decode step; decisions of an earlier tune are used again."""
    context = max(SHORTEST_CONTEXT, 1 << (plan.longest - 1).bit_length())
    asked = pipeline.Request(
        workloads=step(plan.model, batch=1, context=min(context, plan.model.max_context), dtype=plan.dtype),
        effort=settings.get("effort"),
        device=plan.device,
        budget_s=request.budget_s,
    )
    count = len(asked.workloads)
    with screen.working(request.budget_s) as listener, stoppable(listener, count, request.again) as counted:
        report = pipeline.tune(asked, ledger, counted)
    screen.tuned(report, asked.workloads)
    return report


def _certified(plan: Plan, certificates: Path, ledger: Ledger, screen: Screen) -> tuple[Weights, Chosen, Certificate]:
    """Time both arms in turn and append the certificate; also return the weights and the form of the step."""
    with screen.working() as listener:
        listener.expect({("", stage): s for stage, s in run.foreseen(plan, listener).items()})
        weights = load_weights(plan, listener)
        found = measure(plan, weights, listener=listener, ledger=ledger)
    stated = issue.IssueRequest(repro_cmd=command(plan.weights, plan))
    made = issue.issue(found, run.grounds(found, ledger), stated)
    return weights, found.chosen, run.append(certificates, made)


@dataclass(slots=True, kw_only=True)
class _Answers:
    """Both arms' answers to one prompt, each shown token by token."""

    plan: Plan
    weights: Weights
    chat: Chat
    screen: Screen
    made: Certificate
    said: list[int] = field(default_factory=list)

    def pytorch(self) -> Answer:
        return self._answered("pytorch", by_pytorch)

    def autosel(self, chosen: Chosen) -> Answer:
        return self._answered("autosel", partial(by_autosel, chosen=chosen, fp=fingerprint.take(self.plan.device)))

    def _answered(self, arm: ArmName, by: Callable[..., Answer]) -> Answer:
        self.said.clear()
        self.screen.answering(arm, self.made)
        with devices.named(self.plan.device).current():
            found = by(self.weights, self._prompt, self.plan.iters, stop=self.chat.stop, heard=self._hear)
        self.screen.answered()
        return found

    def exact(self, tokens: list[int]) -> Tensor:
        """Return the logits in fp32 after the prompt and these tokens."""
        with devices.named(self.plan.device).current():
            return reference(self.weights, [*self._prompt, *tokens])

    @property
    def _prompt(self) -> list[int]:
        return prompts(self.plan).rows[0]

    def _hear(self, token: int) -> None:
        self.said.append(token)
        self.screen.heard(self.chat.text(self.said))
