"""Service-level objectives: `ttft<500ms,p99_itl<40ms,tps>=10`, each met or not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from autosel.errors import AutoselError, UnknownName, UsageError

Comparison = Literal["<", "<=", ">", ">="]

# Metric -> the side that is better. Times in milliseconds, tps in tokens per second.
METRICS: Mapping[str, str] = {
    "ttft": "<",
    "itl": "<",
    "p50_itl": "<",
    "p90_itl": "<",
    "p95": "<",
    "p99_itl": "<",
    "tps": ">",
}
UNITS_MS: Mapping[str, float] = {"us": 1e-3, "ms": 1.0, "s": 1e3}
FORM = re.compile(r"(\w+)\s*(<=|>=|<|>)\s*(\d+(?:\.\d+)?)\s*(us|ms|s|tok/s)?")


class MissedObjective(AutoselError):
    """A run missed an objective that `--slo` set."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    metric: str
    comparison: Comparison
    limit: float  # milliseconds, or tokens per second
    text: str  # as the user wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedObjective:
    """A requested objective."""

    objective: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(AskedObjective):
    """A requested objective with its measured value, in its unit."""

    measured: float
    met: bool

    @property
    def found(self) -> str:
        """Return the measured value with its unit: `44.1 ms`, `35.2 tok/s`."""
        return f"{self.measured:.4g} {'tok/s' if self.objective.startswith('tps') else 'ms'}"


def parse(text: str) -> tuple[Objective, ...]:
    """Parse the objectives. Raises UsageError, UnknownName."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(_objective(part) for part in parts)


def _objective(text: str) -> Objective:
    match = FORM.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--slo {text!r} is not an objective",
            why=f"a metric ({', '.join(METRICS)}), < or >, and a figure with its unit are expected",
            todo='write it as "ttft<500ms,p99_itl<40ms"',
        )
    metric, comparison, figure, unit = cast(tuple[str, Comparison, str, str | None], match.groups())
    if metric not in METRICS:
        raise UnknownName("objective", metric, tuple(METRICS))
    if comparison[0] != METRICS[metric]:
        better = "lower" if METRICS[metric] == "<" else "higher"
        raise UsageError(f"--slo {text!r}: {better} is better", todo=text.replace(comparison[0], METRICS[metric]))
    if (unit in UNITS_MS) == (metric == "tps"):
        todo = f"{metric}{comparison}{figure}{'tok/s' if metric == 'tps' else 'ms'}"
        raise UsageError(f"--slo {text!r}: {'a rate' if metric == 'tps' else 'a time'} is expected", todo=todo)
    limit = float(figure) * UNITS_MS.get(unit or "", 1.0)
    return Objective(metric=metric, comparison=comparison, limit=limit, text=text)


def judge(objectives: Sequence[Objective], measured: Mapping[str, float]) -> tuple[Judged, ...]:
    """Judge each objective by the metric of its name. Raises UsageError if this run lacks the metric."""
    for o in objectives:
        if o.metric not in measured:
            raise UsageError(f"--slo {o.text}: this run has no {o.metric}", todo="give it a prompt")
    return tuple(
        Judged(objective=o.text, measured=measured[o.metric], met=_holds(measured[o.metric], o)) for o in objectives
    )


def _holds(value: float, objective: Objective) -> bool:
    limit = objective.limit
    return {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[objective.comparison]


def refuse_missed(judged: Sequence[Judged]) -> None:
    """Raise MissedObjective (exit code 3) if an objective was missed."""
    missed = [j for j in judged if not j.met]
    if missed:
        raise MissedObjective(
            f"{len(missed)} of {len(judged)} objectives missed",
            why="\n".join(f"{j.objective}: measured {j.found}" for j in missed),
        )
