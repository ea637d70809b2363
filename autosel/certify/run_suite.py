"""Measure a suite: every configuration of a level, the median of its trials; the middle trial of each is certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autosel import devices, models
from autosel.certify import issue, suite
from autosel.certify.certificate import Certificate
from autosel.certify.command import command
from autosel.certify.run import RunListener, Stage, Within, append, failed, foreseen, grounds
from autosel.certify.suite import Configuration, Level, Run, Suite
from autosel.decode.measure import measure, refuse
from autosel.decode.run import Chosen, Plan
from autosel.decode.weights import Weights, load_weights, memory_need, refuse_unloadable
from autosel.errors import AutoselError, Stopped, out_of_memory
from autosel.fingerprint.describe import remarks
from autosel.ledger.store import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePart:
    """One model's share of a suite. If `decides`, the form of its steps is raced for the ledger."""

    name: str  # as the user wrote it
    configurations: tuple[tuple[Configuration, tuple[Run, ...]], ...]
    decides: bool

    def question(self, runs: Sequence[Run]) -> str:
        """Return a key; runs with the same key use the same form of step."""
        return runs[0].title if self.decides else runs[0].plan.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    """A suite to measure, and the file to append its certificates to, signed if there is a key."""

    level: Level
    parts: tuple[SuitePart, ...]
    certificates: Path
    key: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSuite:
    """A suite and its `trouble`: what ended it early, else what is wrong with the first bad run."""

    suite: Suite
    trouble: AutoselError | None


def parts_of(level: Level, base: Plan, *, model: str = "", layers: int | None = None) -> tuple[SuitePart, ...]:
    """Return the runs of a suite. `base` sets everything except model and configuration.

    Raises every error that refuses a run before anything is loaded.
    """
    base = replace(base, seq=2)  # configurations set the length; the first model's context may not fit another model
    extent, parts = suite.LEVELS[level], []
    for name in suite.models(level, model or None):
        shape = models.load(name)
        of_model = replace(base, model=shape, layers=suite.layers(level, layers, shape.layers))
        plans = [(c, suite.plan_of(of_model, c)) for c in suite.configurations(level)]
        for _, plan in plans:
            refuse(plan)
        refuse_unloadable(max((plan for _, plan in plans), key=memory_need))
        configurations = tuple((c, suite.runs(c, plan, extent)) for c, plan in plans)
        parts.append(SuitePart(name=name, configurations=configurations, decides=extent.decides))
    return tuple(parts)


def measure_suite(request: SuiteRequest, ledger: Ledger | None, listener: RunListener) -> MeasuredSuite:
    """Measure and certify a suite. Ctrl-C or a failed run ends it; finished rows are kept, else it is raised."""
    made = _Made()
    ended: AutoselError | None = None
    _expect(request.parts, listener)
    try:
        for part in request.parts:
            made.weights, made.chosen = None, {}
            for configuration, runs in part.configurations:
                trials = _trials(part, runs, made, listener, ledger)
                made.rows.append(suite.row(configuration, trials))
                made.certified.append(sorted(trials, key=lambda m: m.tokens_per_sec)[len(trials) // 2])
                made.certified[-1] = append(request.certificates, made.certified[-1], request.key)
    except KeyboardInterrupt:
        ended = Stopped("stopped before the first configuration was measured")
    except Exception as error:
        ended = error if isinstance(error, AutoselError) else out_of_memory(error)
        if ended is None:
            raise
    if ended is not None and not made.rows:
        raise ended
    left = sum(len(part.configurations) for part in request.parts) - len(made.rows)
    return MeasuredSuite(suite=_suite(request.level, made, left), trouble=_trouble(made, left, ended))


@dataclass(slots=True)
class _Made:
    """A suite so far."""

    rows: list[suite.SuiteRow] = field(default_factory=list)
    certified: list[Certificate] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # about the device, from its runs
    weights: Weights | None = None  # of the present model, loaded on first use
    chosen: dict[str, Chosen] = field(default_factory=dict)  # its chosen forms of steps, by question


def _expect(parts: Sequence[SuitePart], listener: RunListener) -> None:
    seconds: dict[Stage, float] = {}
    for part in parts:
        asked: set[str] = set()  # questions of earlier configurations
        for i, (_, runs) in enumerate(part.configurations):
            for j, run in enumerate(runs):
                found = foreseen(run.plan, listener, loads=i == j == 0)
                if part.question(runs) in asked:
                    found.pop("chain", None)
                asked.add(part.question(runs))
                seconds |= {(run.title, stage): s for stage, s in found.items()}
    listener.expect(seconds)


def _trials(
    part: SuitePart, runs: Sequence[Run], made: _Made, listener: RunListener, ledger: Ledger | None
) -> list[Certificate]:
    """Run a configuration. Return the certificates of the runs that count."""
    counted, question = [], part.question(runs)
    for run in runs:
        within = Within(listener, run.title)
        made.weights = made.weights or load_weights(run.plan, within)
        devices.named(run.plan.device).forget_peak()  # forget an earlier run's peak
        chosen = made.chosen.get(question)
        found = measure(run.plan, made.weights, listener=within, ledger=ledger, decides=part.decides, chosen=chosen)
        made.chosen[question] = found.chosen
        made.remarks += remarks(found.fingerprint)
        if run.counts:
            stated = issue.IssueRequest(repro_cmd=command(part.name, run.plan))
            counted.append(issue.issue(found, grounds(found, ledger), stated))
    return counted


def _suite(level: Level, made: _Made, left: int) -> Suite:
    last = made.certified[-1]
    return Suite(
        level=level,
        device=last.device,
        hw_id=last.hw_id,
        env_id=last.env_id,
        git_sha=last.git_sha,
        timestamp=last.timestamp,
        rows=tuple(made.rows),
        trials=suite.LEVELS[level].trials,
        left=left,
        notes=tuple(dict.fromkeys(made.remarks)),
    )


def _trouble(made: _Made, left: int, ended: AutoselError | None) -> AutoselError | None:
    if isinstance(ended, Stopped):
        told = f"stopped; {len(made.rows)} of {len(made.rows) + left} configurations measured and certified"
        ended = Stopped(told, todo="a new run measures all of them again") if left else None
    if ended is not None:
        return ended
    return next((trouble for one in made.certified if (trouble := failed(one))), None)
