"""`run --suite`: every configuration of a level, measured, certified and said as one table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from autosel.cli.certificate import change_line, suite_text
from autosel.cli.output import emit_json
from autosel.cli.run import Asked, append, changes_against, changes_json, earlier, grounds, progress, refuse_unwritable

if TYPE_CHECKING:
    from pathlib import Path

    from autosel.certify.certificate import Certificate
    from autosel.certify.suite import Suite
    from autosel.decode.run import Plan


def run_suite(asked: Asked, level: str, as_json: bool) -> None:
    """Every configuration of the level, median of three trials; the middle trial of each is certified."""
    from autosel.certify import compare, suite

    before, key = earlier(asked), asked.key()
    refuse_unwritable(asked)
    found = measured_suite(asked, level, key)
    changes = changes_against(before, lambda: compare.of_suite(found))
    document = suite.document(found)
    if asked["report_to"] is not None:
        _write_suite(asked["report_to"], document)
    if as_json:
        emit_json({**document, "compare": changes_json(changes)})
        return
    click.echo(suite_text(found))
    for change in changes:
        click.echo(change_line(change))


def _write_suite(folder: Path, document: Any) -> None:
    from autosel.certify import report as pages

    pages.replace_file(folder / pages.DOCUMENT, json.dumps(document, indent=1).encode() + b"\n")
    click.echo(f"{folder / pages.DOCUMENT} written", err=True)


def measured_suite(asked: Asked, level: Any, key: Any) -> Suite:
    from autosel import models
    from autosel.certify import suite
    from autosel.certify.issue import Request, issue
    from autosel.decode.measure import measure
    from autosel.decode.weights import load_weights

    rows, last = [], None
    base = asked.plan()
    with progress() as listener:
        for name in suite.models(level, asked["model"] or None):
            model = models.load(name)
            plans = [(c, suite.plan_of(_of_model(base, model), c)) for c in suite.configurations(level)]
            weights = load_weights(plans[0][1], listener)
            for c, plan in plans:

                def trial(plan: Plan, c: Any = c, weights: Any = weights) -> Certificate:
                    listener.stage(f"{plan.model.name} {c.name}", "", 0, 1)
                    run = measure(plan, weights, listener=listener)
                    return issue(run, grounds(run), Request(repro_cmd=f"{asked.repro} --suite {level}"))

                made = suite.trials(plan, trial)
                rows.append(suite.row(c, made))
                last = append(asked.certificates, sorted(made, key=lambda m: m.tokens_per_sec)[len(made) // 2], key)
    assert last is not None
    return suite.Suite(
        level=level,
        device=last.device,
        hw_id=last.hw_id,
        env_id=last.env_id,
        git_sha=last.git_sha,
        timestamp=last.timestamp,
        rows=tuple(rows),
    )


def _of_model(base: Plan, model: Any) -> Plan:
    return replace(base, model=model, layers=min(base.layers, model.layers), seq=2, iters=1)
