"""`run --suite`: every configuration of a level, measured, certified and said as one table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autosel import settings
from autosel.cli.certificate import changes_text, suite_text
from autosel.cli.output import Stopped, emit_json, error_json, leave, noted, out_of_memory
from autosel.cli.progress import Within
from autosel.cli.run import (
    Asked,
    append,
    changes_against,
    changes_json,
    earlier,
    failed,
    foreseen,
    grounds,
    ledger_or_none,
    progress,
    refuse_unwritable,
    weights_of,
)
from autosel.errors import AutoselError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from autosel.certify.certificate import Certificate
    from autosel.certify.compare import Change
    from autosel.certify.suite import Configuration, Level, Row, Run, Suite
    from autosel.cli.progress import Progress
    from autosel.decode.run import AskedStep, Chosen, Plan
    from autosel.ledger.store import Ledger


def run_suite(asked: Asked, level: Level, as_json: bool) -> None:
    """Every configuration of the level, the median of its trials; the middle trial of each is certified.

    Ctrl-C ends it after what is done: that is said and kept, and the exit code is that of any stop.
    """
    from autosel.certify import compare, suite

    _refuse_others(asked)
    before, key = earlier(asked), asked.key()
    refuse_unwritable(asked)
    found, trouble = measured_suite(asked, level, key)
    document = suite.document(found)
    changes: list[Change] = []
    troubles = [trouble] if trouble else []
    with noted(troubles):  # another suite's report
        changes = changes_against(before, lambda: compare.of_suite(found))
    if not as_json:
        where = f"certificates: {settings.spelling()} verify {asked.certificates}"
        click.echo("\n".join(filter(None, [suite_text(found), changes_text(changes), where])))
    if asked["report_to"] is not None:
        with noted(troubles):
            _write_suite(asked["report_to"], document)
    if as_json:
        error = error_json(troubles[0]) if troubles else None
        emit_json({**document, "compare": changes_json(changes), "error": error})
    leave(troubles)


# What a suite takes. Batch, context, steps and sampling are its configurations' own, the rest belongs to one run.
TAKEN = (
    "suite", "model", "weights", "dtype", "layers", "no_persistent", "no_packed", "no_graph", "no_prealloc", "device",
    "seed", "certify", "report_to", "compare", "sign", "key", "as_json",
)  # fmt: skip


def _refuse_others(asked: Asked) -> None:
    ctx = asked.ctx
    known = {str(p.name): p.opts[0] for p in ctx.command.params}
    given = [name for name in known if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    others = [known[name] for name in given if name not in TAKEN]
    if others:
        taken = " ".join(option for name, option in known.items() if name in TAKEN and name != "suite")
        why = f"a suite measures the same configurations everywhere; it takes {taken}"
        raise UsageError(f"{', '.join(others)} with --suite", why=why, todo="measure one run without --suite")


def _write_suite(folder: Path, document: Any) -> None:
    from autosel.certify import report as pages

    pages.replace_file(folder / pages.DOCUMENT, json.dumps(document, indent=1).encode() + b"\n")
    click.echo(f"{folder / pages.DOCUMENT} written", err=True)


def measured_suite(asked: Asked, level: Level, key: Any) -> tuple[Suite, AutoselError | None]:
    """The rows, and what is wrong with the first run that is not as it should be. What ends it, Ctrl-C or a run that
    fails, costs what is left; before the first row it is raised."""
    from autosel.certify import suite

    rows: list[Row] = []
    certified: list[Certificate] = []
    ended: AutoselError | None = None
    with ledger_or_none() as ledger, progress() as listener:
        parts = _parts(asked, level)
        _expect(parts, listener)
        try:
            for part in parts:
                for c, runs in part.configurations:
                    made = _trials(part, runs, listener, ledger)
                    rows.append(suite.row(c, made))
                    certified.append(sorted(made, key=lambda m: m.tokens_per_sec)[len(made) // 2])
                    certified[-1] = append(asked.certificates, certified[-1], key)
                part.weights = None
        except KeyboardInterrupt:
            ended = Stopped("stopped before the first configuration was measured")
        except Exception as error:
            ended = error if isinstance(error, AutoselError) else out_of_memory(error)
            if ended is None:
                raise
    left = sum(len(part.configurations) for part in parts) - len(rows)
    if ended is not None and not rows:
        raise ended
    last = certified[-1]
    found = suite.Suite(
        level=level,
        device=last.device,
        hw_id=last.hw_id,
        env_id=last.env_id,
        git_sha=last.git_sha,
        timestamp=last.timestamp,
        rows=tuple(rows),
        trials=suite.LEVELS[level].trials,
        left=left,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.remarks)),
    )
    if isinstance(ended, Stopped):
        told = f"stopped; {len(rows)} of {len(rows) + left} configurations measured and certified"
        ended = Stopped(told, todo="a new run measures all of them again") if left else None
    if ended is not None:
        return found, ended
    return found, next((trouble for made in certified if (trouble := failed(made))), None)


@dataclass(slots=True, kw_only=True)
class _Part:
    """One model's share of a suite."""

    name: str  # as it was asked for
    configurations: tuple[tuple[Configuration, tuple[Run, ...]], ...]
    decides: bool
    weights: Any = None  # loaded on first use
    chosen: dict[str, Chosen] = field(default_factory=dict)  # how steps are taken, by what was asked
    remarks: list[str] = field(default_factory=list)  # of the device, as its runs met it

    def question(self, runs: Sequence[Run]) -> str:
        """Runs with the same one take their steps alike."""
        return runs[0].title if self.decides else runs[0].plan.cache


def _parts(asked: Asked, level: Level) -> list[_Part]:
    """What is to be run. Raises what refuses a run, before anything is loaded."""
    from autosel import models
    from autosel.certify import suite
    from autosel.decode.measure import refuse
    from autosel.decode.weights import memory_need, refuse_unloadable

    base = replace(asked.plan(), seq=2)  # the configurations say how long; a context of the first model fits no other
    extent, parts = suite.LEVELS[level], []
    for name in suite.models(level, asked["model"] or None):
        model = models.load(name)
        of_model = replace(base, model=model, layers=suite.layers(level, asked["layers"], model.layers))
        plans = [(c, suite.plan_of(of_model, c)) for c in suite.configurations(level)]
        for _, plan in plans:
            refuse(plan)
        refuse_unloadable(max((plan for _, plan in plans), key=memory_need))
        configurations = tuple((c, suite.runs(c, plan, extent)) for c, plan in plans)
        parts.append(_Part(name=name, configurations=configurations, decides=extent.decides))
    return parts


def _expect(parts: Sequence[_Part], listener: Progress) -> None:
    seconds: dict[tuple[str, str], float] = {}
    for part in parts:
        asked: set[str] = set()  # how steps are taken
        for i, (_, runs) in enumerate(part.configurations):
            for j, run in enumerate(runs):
                found = foreseen(run.plan, listener, loads=i == j == 0)
                if part.question(runs) in asked:
                    found.pop("chain", None)
                asked.add(part.question(runs))
                seconds |= {(run.title, stage): s for stage, s in found.items()}
    listener.expect(seconds)


def _trials(part: _Part, runs: Sequence[Run], listener: Progress, ledger: Ledger | None) -> list[Certificate]:
    """Of one configuration, the runs that count."""
    from autosel.certify.issue import Request, issue
    from autosel.decode.device import forget_peak
    from autosel.decode.measure import measure
    from autosel.decode.weights import load_weights
    from autosel.fingerprint.describe import remarks

    made, question = [], part.question(runs)
    for run in runs:
        within = Within(listener, run.title)
        part.weights = part.weights or load_weights(run.plan, within)
        forget_peak(run.plan.device)  # an earlier run's
        chosen = part.chosen.get(question)
        found = measure(run.plan, part.weights, listener=within, ledger=ledger, decides=part.decides, chosen=chosen)
        part.chosen[question] = found.chosen
        part.remarks += remarks(found.fingerprint)
        if run.counts:
            made.append(issue(found, grounds(found), Request(repro_cmd=command(part.name, run.plan))))
    return made


STEP_WORDS: Mapping[AskedStep, list[str]] = {
    "auto": [],
    "ops": ["--no-persistent", "--no-graph"],
    "graph": ["--graph"],
    "whole": ["--persistent"],
}


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
    words += ["--device", plan.device] if plan.device != "cpu" else []
    words += ["--weights", plan.weights] if plan.weights != weights_of(name) else []
    words += ["--paged", plan.page] if plan.cache == "paged" else []
    words += ["--seed", plan.seed] if plan.seed else []
    words += STEP_WORDS[plan.step]
    words += ["--no-packed"] if plan.layout == "plain" else []
    words += ["--no-prealloc"] if not plan.prealloc else []
    if s.changes_greedy:
        words += ["--temperature", s.temperature, "--top-k", s.top_k, "--top-p", s.top_p]
        words += ["--repetition-penalty", s.repetition_penalty]
    return shlex.join([settings.spelling(), "run", *map(str, words)])
