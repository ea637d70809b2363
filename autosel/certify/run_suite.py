"""Measure a suite: every configuration of a level, the median of its trials; the middle trial of each is certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autosel import models
from autosel.certify import issue, suite
from autosel.certify.certificate import Certificate
from autosel.certify.command import command
from autosel.certify.run import Listener, Stage, Within, append, failed, foreseen, grounds
from autosel.certify.suite import Configuration, Level, Run, Suite
from autosel.decode.device import forget_peak
from autosel.decode.measure import measure, refuse
from autosel.decode.run import Chosen, Plan
from autosel.decode.weights import Weights, load_weights, memory_need, refuse_unloadable
from autosel.errors import AutoselError, Stopped, out_of_memory
from autosel.fingerprint.describe import remarks
from autosel.ledger.store import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model's share of a suite. `decides`: who takes its steps whole is raced for the ledger."""

    name: str  # as it was asked for
    configurations: tuple[tuple[Configuration, tuple[Run, ...]], ...]
    decides: bool

    def question(self, runs: Sequence[Run]) -> str:
        """Runs with the same one take their steps alike."""
        return runs[0].title if self.decides else runs[0].plan.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A suite to measure, and the file to append its certificates to, signed if there is a key."""

    level: Level
    parts: tuple[Part, ...]
    certificates: Path
    key: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`trouble`: what ended it early, else what is wrong with the first run that is not as it should be."""

    suite: Suite
    trouble: AutoselError | None


def parts_of(level: Level, base: Plan, *, model: str = "", layers: int | None = None) -> tuple[Part, ...]:
    """Return what is to be run; `base` says all but model and configuration. Raises what refuses a run, before anything
    is loaded."""
    base = replace(base, seq=2)  # the configurations say how long; a context of the first model fits no other
    extent, parts = suite.LEVELS[level], []
    for name in suite.models(level, model or None):
        shape = models.load(name)
        of_model = replace(base, model=shape, layers=suite.layers(level, layers, shape.layers))
        plans = [(c, suite.plan_of(of_model, c)) for c in suite.configurations(level)]
        for _, plan in plans:
            refuse(plan)
        refuse_unloadable(max((plan for _, plan in plans), key=memory_need))
        configurations = tuple((c, suite.runs(c, plan, extent)) for c, plan in plans)
        parts.append(Part(name=name, configurations=configurations, decides=extent.decides))
    return tuple(parts)


def measure_suite(request: Request, ledger: Ledger | None, listener: Listener) -> Measured:
    """Measure and certify all of it. What ends it, Ctrl-C or a run that fails, costs what is left; before the first row
    it is raised."""
    made = _Made()
    ended: AutoselError | None = None
    _expect(request.parts, listener)
    try:
        for part in request.parts:
            shared = _Shared()
            for configuration, runs in part.configurations:
                trials = _trials(part, runs, shared, listener, ledger, made.remarks)
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
    return Measured(suite=_suite(request.level, made, left), trouble=_trouble(made, left, ended))


@dataclass(slots=True)
class _Made:
    """What is measured so far."""

    rows: list[suite.Row] = field(default_factory=list)
    certified: list[Certificate] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # of the device, as its runs met it


@dataclass(slots=True)
class _Shared:
    """What the runs of one model share."""

    weights: Weights | None = None  # loaded on first use
    chosen: dict[str, Chosen] = field(default_factory=dict)  # how steps are taken, by what was asked


def _expect(parts: Sequence[Part], listener: Listener) -> None:
    seconds: dict[Stage, float] = {}
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


def _trials(
    part: Part, runs: Sequence[Run], shared: _Shared, listener: Listener, ledger: Ledger | None, told: list[str]
) -> list[Certificate]:
    """Run a configuration; return the certificates of the runs that count, and add to `told` what was noted."""
    made, question = [], part.question(runs)
    for run in runs:
        within = Within(listener, run.title)
        shared.weights = shared.weights or load_weights(run.plan, within)
        forget_peak(run.plan.device)  # an earlier run's
        chosen = shared.chosen.get(question)
        found = measure(run.plan, shared.weights, listener=within, ledger=ledger, decides=part.decides, chosen=chosen)
        shared.chosen[question] = found.chosen
        told += remarks(found.fingerprint)
        if run.counts:
            stated = issue.Request(repro_cmd=command(part.name, run.plan))
            made.append(issue.issue(found, grounds(found, ledger), stated))
    return made


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
