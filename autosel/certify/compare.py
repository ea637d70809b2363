"""Speedups against an earlier report: a suite's, a run's, or a certificate file. Only equal workloads are compared.

A figure has conditions; which of them differ between two figures is part of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autosel.certify import report, suite, verify
from autosel.certify.certificate import FORMAT as CERTIFICATE
from autosel.certify.certificate import Certificate, Prompt, another_prompt, decode
from autosel.certify.derive import arithmetic
from autosel.certify.physics import TOLERANCE
from autosel.certify.statistics import Interval, median, ratio_interval
from autosel.certify.suite import Suite
from autosel.errors import BadConfig
from autosel.files import is_folder, read_named
from autosel.values import canonical_json, parse_json, to_json

MOST_BYTES = 64 << 20
SLOWEST, FASTEST = 1e-9, 1e15  # tokens per second; outside these limits no ratio is meaningful
Stated = Mapping[str, str | float]  # conditions by name; a float is a rate in bytes per second
ALWAYS = ("device", "mode", "read rate", "other work")  # conditions that are shown even if they are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Tokens per second of one run.

    Two figures are comparable if `what` is equal; `prompt`, if known, tells if they had the same tokens.
    """

    what: str
    tokens_per_s: float
    device: str
    env_id: str
    prompt: Prompt | None = None
    samples: Sequence[float] = ()  # tokens per second of each step or trial; the figure is their median
    stated: Stated = field(default_factory=dict)


Outcome = Literal["faster", "slower", "no difference", "no claim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change between two reports; `speedup` above 1 is faster than before.

    `note` says what else changed. `interval` is None if either has fewer than eight steps or trials.
    """

    what: str
    before: float
    now: float
    note: str
    interval: Interval | None = None
    stated: tuple[Stated, Stated] = ({}, {})  # before, and now

    @property
    def speedup(self) -> float:
        return self.now / self.before

    @property
    def outcome(self) -> Outcome:
        """Return what the figures show. They show nothing if a condition differs or if there is no interval."""
        if self.interval is None or differing(*self.stated):
            return "no claim"
        return "faster" if self.interval.lo > 1 else "slower" if self.interval.hi < 1 else "no difference"


def of_certificates(made: Iterable[Certificate]) -> list[Figure]:
    return [
        Figure(
            what=name(one),
            tokens_per_s=one.tokens_per_sec,
            device=one.device,
            env_id=one.env_id,
            prompt=one.prompt,
            samples=tuple(1e9 / ns for ns in one.samples.optimised_ns),
            stated=conditions(one),
        )
        for one in made
    ]


def of_suite(found: Suite) -> list[Figure]:
    return [
        Figure(
            what=f"{r.model} {r.dtype} {r.configuration} {r.prompt}/{r.tokens}",
            tokens_per_s=r.e2e_tokens_per_s,
            device=found.device,
            env_id=found.env_id,
            samples=r.e2e_trials,
            stated={"device": f"{found.device} {found.hw_id[:12]}", "software": found.env_id[:12]},
        )
        for r in found.rows
    ]


def conditions(made: Certificate) -> Stated:
    """Return what the speed of a run depends on, besides the kernels that served it."""
    return {
        "device": f"{made.device} {made.hw_id[:12]}",
        "mode": made.mode,
        "read rate": made.read_median_bytes_per_s,
        "other work": "yes" if made.contended else "no",
        "timed by": made.timed_by,
        **({} if made.baseline else {"baseline": "none"}),
        "prompt": made.prompt.tokens_sha256[:12] if made.prompt else "none",
        **{name: str(value) for name, value in made.environment.items()},
    }


def differing(one: Stated, other: Stated) -> tuple[str, ...]:
    """Return the names of the conditions that differ. Rates are equal within the error of a read probe."""
    names = dict.fromkeys((*one, *other))
    return tuple(name for name in names if not _equal(one.get(name, "unknown"), other.get(name, "unknown")))


def _equal(one: str | float, other: str | float) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return max(one, other) <= TOLERANCE * min(one, other)


# Options that do not make another workload.
FASTER = ("seed", "mode", "cache", "page", "prealloc", "saved_bytes", "baseline")


def name(made: Certificate) -> str:
    """Return the text that identifies a workload: everything except what only changes its speed."""
    asked = {k: v for k, v in made.options.items() if k not in FASTER}
    plain = {"advance": False, "speculate": 0, "small_batch": False, "temperature": 0, "prompt": "random"}
    sampled = asked.get("temperature", 0) != 0
    moved = [f"{k}={v}" for k, v in sorted(asked.items()) if plain.get(k, v) != v or (sampled and k not in plain)]
    where = f"{made.model} {arithmetic(made)} batch {made.shape.batch} context {made.shape.seq}"
    return " ".join([where, *moved])


def read(path: Path, line: int = 0) -> list[Figure]:
    """Return the figures of a report, or of one line of a certificate file (0: all).

    Raises BadConfig; BadCertificate for an edited certificate.
    """
    found = _figures(path, line)
    if not found:
        raise BadConfig(f"{path} contains no run to compare with")
    for one in found:
        if not SLOWEST <= one.tokens_per_s <= FASTEST:
            raise BadConfig(f"{path} cannot be trusted", why=f"{one.what[:200]}: {one.tokens_per_s:g} tokens a second")
    return found


def _figures(path: Path, line: int) -> list[Figure]:
    if is_folder(path):
        path = path / report.DOCUMENT
    if path.suffix == ".jsonl":
        return of_certificates(made for number, made in verify.read(path, strict=True) if line in (0, number))
    data = _json(path)
    if data.get("format") == suite.FORMAT:
        return of_suite(suite.from_document(data))
    if data.get("format") == report.FORMAT:
        held = data.get("certificates")
        if not isinstance(held, list):
            raise BadConfig(f"{path} is not a report", why=f"certificates is {held!r:.60}: a list is expected")
        return of_certificates(_certificate(path, one) for one in held)
    alone = data if "format" in data else data.get("certificate")  # `run --json` has other fields too
    if isinstance(alone, dict) and alone.get("format") == CERTIFICATE:
        return of_certificates([_certificate(path, alone)])
    raise BadConfig(
        f"{path} is not a report", why="a folder or file that run wrote is expected: --report, --json, --certify"
    )


def compare(now: Sequence[Figure], before: Sequence[Figure]) -> list[Change]:
    """Return the changes of what ran in both; the latest run counts. Raises BadConfig if they have no run in common."""
    earlier = {one.what: one for one in before}
    changes = [_change(one, earlier[one.what]) for one in now if one.what in earlier]
    if not changes:
        ran = ", ".join(dict.fromkeys(one.what for one in before)) or "nothing"
        raise BadConfig("nothing to compare: the earlier report has other runs", why=f"it has {ran[:300]}")
    return changes


def document(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return the changes as JSON."""
    return [
        {**to_json(change), "speedup": change.speedup, "outcome": change.outcome}
        | {"differ": list(differing(*change.stated))}
        for change in changes
    ]


def _change(now: Figure, before: Figure) -> Change:
    other = []
    if now.device != before.device:
        other.append(f"on {before.device}")
    elif now.env_id != before.env_id:
        other.append("with other software")
    if another_prompt(now.prompt, before.prompt):
        other.append("on another prompt")
    if ("baseline" in before.stated) != ("baseline" in now.stated):  # only a run without one states it
        other.append("without a baseline" if "baseline" in before.stated else "with a baseline")
    note = f"then {', '.join(other)}" if other else ""
    return Change(
        what=now.what,
        before=before.tokens_per_s,
        now=now.tokens_per_s,
        note=note,
        interval=_interval(now, before),
        stated=(before.stated, now.stated),
    )


def _interval(now: Figure, before: Figure) -> Interval | None:
    """Return the interval of the ratio. Samples may have another unit than the figure, the same in both."""
    found = ratio_interval(now.samples, before.samples)
    if found is None:
        return None
    scale = now.tokens_per_s / before.tokens_per_s / (median(now.samples) / median(before.samples))
    return Interval(lo=found.lo * scale, hi=found.hi * scale)


def _json(path: Path) -> dict[str, Any]:
    content = read_named(path, MOST_BYTES)
    try:
        data = parse_json(content, what=path.name)
    except ValueError as error:
        raise BadConfig(f"{path} is not a report", why=str(error)) from error
    if not isinstance(data, dict):
        raise BadConfig(f"{path} is not a report", why="an object is expected")
    return data


def _certificate(path: Path, document: Any) -> Certificate:
    try:
        return decode(canonical_json(document))
    except (ValueError, TypeError) as error:
        raise BadConfig(f"{path} has a certificate that cannot be trusted", why=str(error)) from error
