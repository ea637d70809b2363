"""`run --suite`: measure and certify every configuration of a level, and print one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from autosel import settings
from autosel.certify import compare, report, suite
from autosel.certify.compare import Change
from autosel.certify.suite import Level
from autosel.cli.asked import Asked, earlier, ledger_or_none, refuse_unwritable
from autosel.cli.certificate import changes_text, suite_text
from autosel.cli.output import emit_json, error_json, leave, noted
from autosel.cli.progress import Progress
from autosel.cli.untuned import show_untuned
from autosel.errors import UsageError

if TYPE_CHECKING:
    from autosel.certify.run_suite import SuitePart


def run_suite(asked: Asked, level: Level, as_json: bool) -> None:
    """Measure and certify every configuration of the level.

    Ctrl-C keeps and prints the finished configurations; the exit code is that of any stop.
    """
    from autosel.certify.run_suite import SuiteRequest, measure_suite, parts_of

    _refuse_others(asked)
    before, key = earlier(asked), asked.key()
    refuse_unwritable(asked)
    parts = parts_of(level, asked.plan(), model=asked["model"], layers=asked["layers"])
    request = SuiteRequest(level=level, parts=parts, certificates=asked.certificates, key=key)
    with ledger_or_none() as ledger:
        if ledger is not None:
            show_untuned_suite(asked, parts)
        with Progress() as listener:
            found = measure_suite(request, ledger, listener)
    document = suite.document(found.suite)
    changes: Sequence[Change] = []
    troubles = [found.trouble] if found.trouble else []
    with noted(troubles):  # --compare may name another suite's report
        changes = compare.compare(compare.of_suite(found.suite), before) if before else []
    if not as_json:
        where = f"certificates: {settings.spelling()} verify {asked.certificates}"
        click.echo("\n".join(filter(None, [suite_text(found.suite), changes_text(changes), where])))
    if asked["report_to"] is not None:
        with noted(troubles):
            report.write_json(asked["report_to"] / report.DOCUMENT, document)
            click.echo(f"{asked['report_to'] / report.DOCUMENT} written", err=True)
    if as_json:
        error = error_json(troubles[0]) if troubles else None
        emit_json({**document, "compare": compare.document(changes), "error": error})
    leave(troubles)


def show_untuned_suite(asked: Asked, parts: Sequence[SuitePart]) -> None:
    """Print for each model what is not tuned for its longest configuration, with the command."""
    for part in parts:
        plan = max((runs[0].plan for _, runs in part.configurations), key=lambda p: p.longest)
        show_untuned(asked.ctx, replace(plan, seq=plan.longest, advance=False, speculate=0))


# Options that a suite accepts. Its configurations set batch, context, steps and sampling; the rest belongs to one run.
TAKEN = (
    "suite", "model", "weights", "dtype", "layers", "step", "weights_layout", "no_prealloc", "device", "seed",
    "certify", "report_to", "compare", "sign", "key", "as_json",
)  # fmt: skip


def _refuse_others(asked: Asked) -> None:
    ctx = asked.ctx
    known = {str(p.name): p.opts[0] for p in ctx.command.params}
    given = [name for name in known if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    others = [known[name] for name in given if name not in TAKEN]
    if others:
        taken = " ".join(option for name, option in known.items() if name in TAKEN and name != "suite")
        why = f"a suite measures the same configurations everywhere; it accepts {taken}"
        raise UsageError(f"--suite excludes {', '.join(others)}", why=why, todo="measure one run without --suite")
