"""A sweep: a decode step over contexts and batches, candidates that served, changes of winners, the user's traffic.

Values and arithmetic, without torch.

    step time between two measured contexts   linear: weights cost the same at every context, keys and values are read
                                              once each
    traffic's tokens per second at a batch    tokens / sum over tokens of (step time at the token's context / batch)
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

from autosel import files
from autosel.certify.statistics import Interval
from autosel.errors import BadConfig, UsageError
from autosel.values import EXACT, Decision, parse_json, to_json

FORMAT = "autosel.sweep"
MOST_CELLS = 400
MOST_REQUESTS = 1_000_000
FILE_LIMIT_BYTES = 64 << 20
Axis = Literal["batch", "context"]


def span(text: str, option: str, low: int, high: int) -> tuple[int, ...]:
    """Return the doubled sizes: `256:2048` gives 256, 512, 1024, 2048; `100:300` gives 100, 200, 300; `8` gives 8.

    Raises UsageError.
    """
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not low <= first <= last <= high:
        raise UsageError(
            f"{option} {text!r}",
            why=f"FIRST:LAST, or one number, from {low} to {high} is expected",
            todo=f"{option} {max(low, 1)}:{min(high, 8 * max(low, 1))} doubles from the first to the last",
        )
    return doubled(first, last)


def doubled(first: int, last: int) -> tuple[int, ...]:
    """Return 128, 256, ... and the last size."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return (*found, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """One request of the user's traffic: tokens in, tokens out."""

    prompt: int
    output: int


def read_traffic(path: Path) -> tuple[Lengths, ...]:
    """Read a file of lengths: `PROMPT OUTPUT` on each line (space, tab or comma; # starts a comment), or a JSON list of
    pairs.

    Raises BadConfig that names the line.
    """
    try:
        text = files.read(path, FILE_LIMIT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} cannot be read", why=str(error), todo="check the path") from error
    found = tuple(_json_pairs(path, text) if path.suffix == ".json" else _line_pairs(path, text))
    if not found:
        raise BadConfig(f"{path} has no request", why="a line `PROMPT OUTPUT` is expected for each")
    if len(found) > MOST_REQUESTS:
        raise BadConfig(f"{path} has {len(found)} requests", why=f"at most {MOST_REQUESTS} are read")
    return found


def _line_pairs(path: Path, text: str) -> Iterable[Lengths]:
    for number, line in enumerate(text.splitlines(), 1):
        words = re.split(r"[\s,]+", line.partition("#")[0].strip())
        if words == [""]:
            continue
        if len(words) != 2 or not all(re.fullmatch(r"\d{1,9}", w) for w in words):
            raise BadConfig(
                f"{path}, line {number}: {line[:60]!r}", why="PROMPT OUTPUT, two whole numbers, is expected"
            )
        yield _request(f"{path}, line {number}", int(words[0]), int(words[1]))


def _json_pairs(path: Path, text: str) -> Iterable[Lengths]:
    try:
        data = parse_json(text, what=path.name, depth=3)
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON", why=str(error)) from error
    for number, pair in enumerate(data if isinstance(data, list) else [data], 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int for n in pair):
            raise BadConfig(f"{path}, entry {number}", why="[PROMPT, OUTPUT], two whole numbers, is expected")
        yield _request(f"{path}, entry {number}", *pair)


def _request(where: str, prompt: int, output: int) -> Lengths:
    if not (1 <= prompt < 1 << 24 and 1 <= output < 1 << 24):
        raise BadConfig(f"{where}: {prompt} in, {output} out", why="each is at least 1 and below 2^24")
    return Lengths(prompt=prompt, output=output)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpServing:
    """Candidate that served one op of a step; `bucket` is the range of sizes of its decision."""

    op: str
    label: str
    bucket: str
    calls: int
    candidate: str
    state: str  # of a decision, or "undecided": its race did not end, so the kept candidate need not be the fastest
    decision_id: int | None

    @property
    def decided(self) -> bool:
        return self.decision_id is not None and self.state != "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one cell: baseline and optimised steps in turn, as in a certificate. Times in milliseconds."""

    p50_ms: float
    p95_ms: float
    tokens_per_s: float
    baseline_ms: float
    speedup: float
    speedup_interval: Interval | None  # None for fewer than eight steps
    roofline: float
    read_bytes_per_s: float
    verified: bool
    chain: str
    serving: tuple[OpServing, ...]
    # 95 % intervals of the medians; None for fewer than eight steps
    p50_interval_ms: Interval | None = None
    baseline_interval_ms: Interval | None = None
    contended: bool = False  # other work ran when the device's rates were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """One batch at one context. `figures` is None if it was not measured; `why` gives the reason."""

    batch: int
    context: int
    need_bytes: int
    figures: Figures | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellServing:
    """Serving candidates at one batch and context, measured or only tuned."""

    batch: int
    context: int
    serving: tuple[OpServing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Change of an op's winner along one axis: `below` serves up to `last`, `above` from `first` on.

    Sizes between were not tried. `decided` is True if both are rows of the ledger.
    """

    label: str
    axis: Axis
    last: int
    first: int
    below: str
    above: str
    decided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The traffic at one batch: tokens per second of decoding, for both arms.

    `covered` is the share of its tokens whose context is in the measured range; the others are left out.
    """

    batch: int
    tokens_per_s: float
    baseline_tokens_per_s: float
    covered: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The user's own lengths, and the batch that serves them fastest; None if no measured context covers them."""

    file: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    by_batch: tuple[Weighed, ...]
    best_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    model: str
    dtype: str
    device: str
    hw_id: str
    env_id: str
    git_sha: str
    timestamp: str
    memory_bytes: int
    iters: int
    cells: tuple[SweepCell, ...]
    changes: tuple[Crossing, ...]
    traffic: Traffic | None = None


def document(found: Sweep) -> dict[str, object]:
    return {"format": FORMAT, "version": 1, "sweep": to_json(found)}


def with_doubts(cells: Iterable[SweepCell], undecided: Set[int]) -> list[SweepCell]:
    """Return the cells, with the undecided decisions marked."""

    def marked(s: OpServing) -> OpServing:
        return replace(s, state="undecided") if s.decision_id in undecided else s

    made = []
    for c in cells:
        f = c.figures
        made.append(c if f is None else replace(c, figures=replace(f, serving=tuple(map(marked, f.serving)))))
    return made


def served(cells: Iterable[SweepCell]) -> list[CellServing]:
    return [
        CellServing(batch=c.batch, context=c.context, serving=c.figures.serving) for c in cells if c.figures is not None
    ]


def changes_of(points: Sequence[CellServing], decisions: Sequence[Decision] = ()) -> tuple[Crossing, ...]:
    """Return the changes of every op: along the batch at the shortest context, and along the context at each batch.

    A bucket that tuning split gives the exact context; other changes are bracketed by measured contexts.
    """
    shortest = min((p.context for p in points), default=0)
    found = _along("batch", [p for p in points if p.context == shortest])
    for batch in sorted({p.batch for p in points}):
        found += _along("context", [p for p in points if p.batch == batch])
    splits = splits_of(decisions)
    return tuple(dict.fromkeys([*splits, *(c for c in found if c.axis == "batch" or not _told(c, splits))]))


def _along(axis: Axis, points: Sequence[CellServing]) -> list[Crossing]:
    at: Callable[[CellServing], int] = attrgetter(axis)
    found = []
    for a, b in itertools.pairwise(sorted(points, key=at)):
        mine = {route(s.label): s for s in a.serving}
        for s in b.serving:
            before = mine.get(route(s.label))
            if before is not None and before.candidate != s.candidate:
                found.append(
                    Crossing(
                        label=route(s.label),
                        axis=axis,
                        last=at(a),
                        first=at(b),
                        below=before.candidate,
                        above=s.candidate,
                        decided=before.decided and s.decided,
                    )
                )
    return found


def route(label: str) -> str:
    """Return `linear o` for `gemv o` and `gemm o`, labels of sweeps and certificates by earlier versions."""
    kind, _, name = label.partition(" ")
    return f"linear {name}" if kind in ("gemv", "gemm") else label


def splits_of(decisions: Sequence[Decision]) -> list[Crossing]:
    """Return the changes of context from the buckets that tuning split by bisection."""
    rows: dict[tuple[str, str], list[Decision]] = {}
    for d in decisions:
        if d.length_range is not None:
            rows.setdefault((d.workload.at(L=1).key, d.bucket), []).append(d)
    found = []
    for parts in rows.values():
        parts.sort(key=lambda d: d.length_range or (0, 0))
        for a, b in itertools.pairwise(parts):
            assert a.length_range is not None and b.length_range is not None
            found.append(
                Crossing(
                    label=f"{a.op} B{a.workload['B']}",
                    axis="context",
                    last=a.length_range[1],
                    first=b.length_range[0],
                    below=a.arm.candidate,
                    above=b.arm.candidate,
                    decided=True,
                )
            )
    return found


def _told(change: Crossing, splits: Sequence[Crossing]) -> bool:
    """Return True if a split bucket already gives the crossover between these two contexts."""
    return any(
        s.label.split(" ")[0] == change.label.split(" ")[0]
        and (s.below, s.above) == (change.below, change.above)
        and change.last <= s.last < change.first
        for s in splits
    )


def middles(changes: Iterable[Crossing]) -> list[int]:
    """Return the batches to try next, until each change along the batch is exact.

    M is exact up to EXACT; above it a bucket holds a power of two, so there is no batch to try.
    """
    along = [c for c in changes if c.axis == "batch" and c.decided]  # skips changes that no race decided
    ends = [(c.last, min(c.first, EXACT + 1)) for c in along]
    return sorted({(last + first) // 2 for last, first in ends if first - last > 1})


def weigh(requests: Sequence[Lengths], cells: Sequence[SweepCell], file: str) -> Traffic:
    counts = contexts_of(requests)
    total = sum(counts.values())
    weighed = []
    for batch in sorted({c.batch for c in cells if c.figures is not None}):
        row = sorted((c for c in cells if c.batch == batch and c.figures is not None), key=lambda c: c.context)
        reach = row[-1].context
        inside = {context: n for context, n in counts.items() if context <= reach}
        tokens = sum(inside.values())
        if not tokens:
            continue
        ours, theirs = (
            sum(n * step_ms(row, context, arm) for context, n in inside.items()) for arm in ("p50_ms", "baseline_ms")
        )
        weighed.append(
            Weighed(
                batch=batch,
                tokens_per_s=1e3 * batch * tokens / ours,
                baseline_tokens_per_s=1e3 * batch * tokens / theirs,
                covered=tokens / total,
            )
        )
    best = max(weighed, key=lambda w: (w.covered, w.tokens_per_s), default=None)
    return Traffic(
        file=file,
        requests=len(requests),
        prompt_tokens=sum(r.prompt for r in requests),
        output_tokens=sum(r.output for r in requests),
        by_batch=tuple(weighed),
        best_batch=best.batch if best else None,
    )


STRIDE = 1.02  # contexts closer than this count as one: step times are linear between measured ones anyway


def contexts_of(requests: Sequence[Lengths]) -> dict[int, int]:
    """Return the number of the traffic's tokens that are decoded near each context.

    A request's token i (from 1) attends to prompt + i tokens; the first token comes from the prompt's pass.
    """
    found: dict[int, int] = {}
    for r in requests:
        first, last = r.prompt + 2, r.prompt + r.output
        while first <= last:
            end = min(last, max(first, math.floor(first * STRIDE)))
            middle = (first + end) // 2
            found[middle] = found.get(middle, 0) + end - first + 1
            first = end + 1
    return found


def step_ms(row: Sequence[SweepCell], context: int, arm: str) -> float:
    """Return a step's time at a context, interpolated in the cells of one batch; below the shortest, the shortest's."""
    at = bisect_left([c.context for c in row], context)
    values = [getattr(c.figures, arm) for c in row]
    if at == 0:
        return float(values[0])
    (a, b), (low, high) = (row[at - 1].context, row[at].context), values[at - 1 : at + 1]
    return float(low + (high - low) * (context - a) / (b - a))
