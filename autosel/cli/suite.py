"""`run --suite`: every configuration of a level, measured, certified and said as one table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from autosel import settings
from autosel.cli.certificate import change_line, suite_text
from autosel.cli.output import emit_json, error_json, report
from autosel.cli.progress import Within
from autosel.cli.run import (
    Asked,
    append,
    changes_against,
    changes_json,
    earlier,
    failed,
    grounds,
    ledger_or_none,
    progress,
    refuse_unwritable,
)
from autosel.errors import AutoselError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from autosel.certify.certificate import Certificate
    from autosel.certify.suite import Suite
    from autosel.decode.run import Plan


def run_suite(asked: Asked, level: str, as_json: bool) -> None:
    """Every configuration of the level, median of three trials; the middle trial of each is certified."""
    from autosel.certify import compare, suite

    _refuse_options_of_one_run(asked)
    before, key = earlier(asked), asked.key()
    refuse_unwritable(asked)
    found, trouble = measured_suite(asked, level, key)
    changes = changes_against(before, lambda: compare.of_suite(found))
    document = suite.document(found)
    if asked["report_to"] is not None:
        _write_suite(asked["report_to"], document)
    if as_json:
        error = error_json(trouble) if trouble else None
        emit_json({**document, "compare": changes_json(changes), "error": error})
    else:
        click.echo(suite_text(found))
        for change in changes:
            click.echo(change_line(change))
    if trouble is not None:
        report(trouble)
        raise click.exceptions.Exit(trouble.exit_code)


def _refuse_options_of_one_run(asked: Asked) -> None:
    for name, option in (("slo", "--slo"), ("audit_to", "--audit"), ("trace_to", "--trace"), ("score", "--quality")):
        if asked[name]:
            raise UsageError(f"{option} with --suite", why="it belongs to one run; a suite is many")


def _write_suite(folder: Path, document: Any) -> None:
    from autosel.certify import report as pages

    pages.replace_file(folder / pages.DOCUMENT, json.dumps(document, indent=1).encode() + b"\n")
    click.echo(f"{folder / pages.DOCUMENT} written", err=True)


def measured_suite(asked: Asked, level: Any, key: Any) -> tuple[Suite, AutoselError | None]:
    """The rows, and what is wrong with the first run that is not as it should be."""
    from autosel import models
    from autosel.certify import suite
    from autosel.certify.issue import Request, issue
    from autosel.decode.measure import measure, refuse
    from autosel.decode.weights import load_weights, memory_need, refuse_without_memory

    rows, certified = [], []
    base = asked.plan()
    with ledger_or_none() as ledger, progress() as listener:
        for name in suite.models(level, asked["model"] or None):
            model = models.load(name)
            plans = [(c, suite.plan_of(_of_model(base, model), c)) for c in suite.configurations(level)]
            for _, plan in plans:
                refuse(plan)
            refuse_without_memory(max((plan for _, plan in plans), key=memory_need))
            weights = load_weights(plans[0][1], listener)
            for c, plan in plans:
                under_way = suite.under_way(f"{plan.model.name} {c.name} {c.prompt}/{c.tokens}")

                def trial(
                    plan: Plan, name: str = name, titles: Iterator[str] = under_way, weights: Any = weights
                ) -> Certificate:
                    within = Within(listener, next(titles))
                    run = measure(plan, weights, listener=within, ledger=ledger)
                    return issue(run, grounds(run), Request(repro_cmd=command(name, plan)))

                made = suite.trials(plan, trial)
                rows.append(suite.row(c, made))
                middle = sorted(made, key=lambda m: m.tokens_per_sec)[len(made) // 2]
                certified.append(append(asked.certificates, middle, key))
    last = certified[-1]
    found = suite.Suite(
        level=level,
        device=last.device,
        hw_id=last.hw_id,
        env_id=last.env_id,
        git_sha=last.git_sha,
        timestamp=last.timestamp,
        rows=tuple(rows),
    )
    return found, next((trouble for made in certified if (trouble := failed(made))), None)


def command(name: str, plan: Plan) -> str:
    """The command that measures one trial's plan again."""
    s = plan.sampling
    words = [
        "--model",
        name,
        "--dtype",
        plan.dtype,
        "--seq",
        plan.seq,
        "--iters",
        plan.iters,
        "--warmup",
        0,
        "--advance",
    ]
    words += ["--layers", plan.layers] if plan.layers else []
    words += ["--weights", plan.weights] if plan.weights != "random" else []
    words += ["--paged", plan.page] if plan.cache == "paged" else []
    words += ["--seed", plan.seed] if plan.seed else []
    if s.changes_greedy:
        words += ["--temperature", s.temperature, "--top-k", s.top_k, "--top-p", s.top_p]
        words += ["--repetition-penalty", s.repetition_penalty]
    return shlex.join([settings.spelling(), "run", *map(str, words)])


def _of_model(base: Plan, model: Any) -> Plan:
    return replace(base, model=model, layers=min(base.layers, model.layers), seq=2, iters=1)
