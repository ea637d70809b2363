"""Measure a certificate again: the same plan, prompt and text on this device, compared statistically (see rerun)."""

from __future__ import annotations

from pathlib import Path

from autosel import fingerprint
from autosel.certify import run
from autosel.certify.certificate import Certificate
from autosel.certify.issue import prompt_of
from autosel.certify.rerun import (
    Rerun,
    compare,
    refuse_other_device,
    refuse_other_model,
    refuse_other_prompt,
    refuse_other_text,
)
from autosel.certify.run import RunListener, RunRequest
from autosel.decode.prompt import prompts, text_to_score
from autosel.decode.run import Plan, Text
from autosel.errors import UsageError
from autosel.ledger.store import Ledger


def run_again(certified: Certificate, request: RunRequest, ledger: Ledger | None, listener: RunListener) -> Rerun:
    """Measure the certificate's plan on this device, score its text again, and compare.

    Raises UsageError if the plan, the prompt or the text differs from the certified one; call `refuse_others` first.
    """
    return compare(certified, run.certified(request, ledger, listener)[0])


def refuse_others(certified: Certificate, plan: Plan) -> None:
    """Refuse another device, model or prompt before anything is measured. Raises UsageError, NotReproduced."""
    fp = fingerprint.take(plan.device)
    refuse_other_device(certified, fp.hw_id, fp.name)
    refuse_other_model(certified, plan)
    refuse_other_prompt(certified, prompt_of(prompts(plan).digest))


def original_again(certified: Certificate, *, then: str) -> str:
    """Return the original that the certificate's command names; "" if its format was not scored against one.

    Raises UsageError if it is gone.
    """
    if certified.format_quality is None or not then:
        return ""
    if not Path(then).expanduser().exists():
        raise UsageError(f"the original is no longer at {then}", why="the certified format was scored against it")
    return then


def text_again(certified: Certificate, plan: Plan, *, named: Path | None, then: Path | None) -> Text | None:
    """Return the text that the certificate scored: the named file, else the file of the certificate's command.

    Raises UsageError if it does not exist or is another text.
    """
    if certified.quality is None:
        if named is not None:
            raise UsageError("--quality: the certificate scored no text", todo="leave --quality out")
        return None
    path = named or then
    if path is None:
        raise UsageError(
            f"the certificate scored a text, {certified.quality.get('text')}, and its command does not name the file",
            todo="name that text with --quality",
        )
    if named is None and not path.exists():
        raise UsageError(f"the scored text is no longer at {path}", todo="name where it is now with --quality")
    text = text_to_score(path, plan)
    refuse_other_text(certified, text.sha256, str(path))
    return text
