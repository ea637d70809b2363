"""The suites: seven prompt/generation configurations of three small models, with whole answers timed.

Each figure is the median of eight trials after a warm-up; the quick suite has shorter answers. The trials are the
blocks of a speedup's interval. A trial is an ordinary run with an advancing stream: a prompt, then tokens, with
baseline and optimised steps in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosel.certify.certificate import Certificate
from autosel.certify.derive import against_baseline
from autosel.certify.statistics import FEWEST_TO_RESAMPLE, Interval, median, median_interval
from autosel.decode.run import GREEDY, Plan, Sampling
from autosel.errors import BadConfig
from autosel.values import from_json, to_json

Level = Literal["quick", "standard", "full"]
MODELS = ("llama-1b", "qwen3-1.7b", "gemma3-1b")
FORMAT = "autosel.suite"
WARM_UP_TOKENS = 8
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Size of a level. Answers are `shorter` times shorter.

    If `decides`, the form of the steps is decided for each configuration, with a race for the ledger if it is
    undecided; else once for each layout of the cache.
    """

    models: tuple[str, ...] = MODELS[:1]
    layers: int = 0  # unless the user sets another number; 0: all
    shorter: int = 1
    trials: int = 8  # the fewest that give an interval
    decides: bool = True


LEVELS: Mapping[Level, Extent] = {
    "quick": Extent(layers=4, shorter=16, decides=False),
    "standard": Extent(),
    "full": Extent(models=MODELS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One configuration: `prompt` tokens in, `tokens` out, the first of them from the prompt's pass."""

    name: str
    prompt: int
    tokens: int
    sampling: Sampling = GREEDY
    paged: bool = False


SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95)
CONFIGURATIONS = (
    Configuration(name="short", prompt=64, tokens=64),
    Configuration(name="medium", prompt=256, tokens=256),
    Configuration(name="prefill", prompt=1024, tokens=64),
    Configuration(name="decode", prompt=64, tokens=1024),
    Configuration(name="long", prompt=1024, tokens=1024),
    Configuration(name="sampled", prompt=256, tokens=256, sampling=SAMPLED),
    Configuration(
        name="full-pipe", prompt=256, tokens=256, sampling=replace(SAMPLED, repetition_penalty=1.1), paged=True
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRow:
    """One configuration of one model. Rates in tokens per second, times in milliseconds."""

    model: str
    dtype: str
    configuration: str
    prompt: int
    tokens: int
    e2e_tokens_per_s: float
    decode_tokens_per_s: float
    p50_step_ms: float
    p95_step_ms: float
    ttft_ms: float
    speedup: float
    cache_bytes: int
    peak_memory_bytes: int
    speedup_interval: Interval | None = None  # trials are its blocks; None for fewer than eight
    e2e_trials: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    level: Level
    device: str
    hw_id: str
    env_id: str
    git_sha: str
    timestamp: str
    rows: tuple[SuiteRow, ...]
    trials: int = 3
    left: int = 0  # rows that were not measured, because the suite was stopped
    notes: tuple[str, ...] = ()  # notes about the device, also in each row's certificate


def configurations(level: Level) -> tuple[Configuration, ...]:
    """Return all seven configurations, with shorter answers for the quick suite."""
    shorter = LEVELS[level].shorter
    return tuple(replace(c, tokens=max(min(c.tokens, LEAST_TOKENS), c.tokens // shorter)) for c in CONFIGURATIONS)


def models(level: Level, asked: str | None) -> tuple[str, ...]:
    """Return the requested model; else llama-1b, or all three for the full suite."""
    return (asked,) if asked else LEVELS[level].models


def layers(level: Level, asked: int | None, of: int) -> int:
    """Return how many of a model's layers run; 0 means all."""
    found = min(of, asked or LEVELS[level].layers)
    return 0 if found == of else found


def plan_of(base: Plan, c: Configuration) -> Plan:
    """Return the plan of a trial. `base` has model, layers, dtype, weights and device."""
    return replace(
        base,
        seq=c.prompt + 1,
        iters=c.tokens - 1,
        warmup=0,
        batch=1,
        advance=True,
        sampling=replace(c.sampling, seed=base.seed),
        cache="paged" if c.paged else "contiguous",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A warm-up or a trial. `title` is unique in its suite."""

    title: str
    plan: Plan
    counts: bool


def runs(c: Configuration, plan: Plan, extent: Extent) -> tuple[Run, ...]:
    """Return a warm-up of a few tokens, then the trials, which count."""
    what = f"{plan.model.name} {c.name} {c.prompt}/{c.tokens}"
    warm_up = Run(title=f"{what}, warm-up", plan=replace(plan, iters=min(plan.iters, WARM_UP_TOKENS)), counts=False)
    trials = (f"{what}, trial {i} of {extent.trials}" for i in range(1, extent.trials + 1))
    return (warm_up, *(Run(title=title, plan=plan, counts=True) for title in trials))


def row(c: Configuration, made: Sequence[Certificate]) -> SuiteRow:
    """Return the row of a configuration: each figure is the median of the trials."""

    def middle(figure: Callable[[Certificate], float]) -> float:
        return median([figure(one) for one in made])

    speedups, rates = [against_baseline(one).speedup for one in made], [end_to_end(one, c.tokens) for one in made]
    return SuiteRow(
        model=made[0].model,
        dtype=made[0].dtype,
        configuration=c.name,
        prompt=c.prompt,
        tokens=c.tokens,
        e2e_tokens_per_s=median(rates),
        decode_tokens_per_s=middle(lambda one: one.sustained_tokens_per_sec),
        p50_step_ms=middle(lambda one: one.latency_ms.med),
        p95_step_ms=middle(lambda one: one.latency_ms.p95),
        ttft_ms=middle(lambda one: one.ttft_ms or 0.0),
        speedup=median(speedups),
        cache_bytes=made[0].kv_cache_bytes,
        peak_memory_bytes=max(one.peak_memory_bytes for one in made),
        speedup_interval=median_interval(speedups) if len(made) >= FEWEST_TO_RESAMPLE else None,
        e2e_trials=tuple(rates),
    )


def end_to_end(made: Certificate, tokens: int) -> float:
    """Return tokens per second from the prompt's arrival to the last token."""
    steps = made.samples.optimised_host_ns or made.samples.optimised_ns
    seconds = (made.ttft_ms or 0.0) / 1e3 + sum(steps) / 1e9
    return made.shape.batch * tokens / seconds


def document(suite: Suite) -> dict[str, object]:
    return {"format": FORMAT, "version": 1, "suite": to_json(suite)}


def from_document(data: Mapping[str, object]) -> Suite:
    """Return the suite of a document. Raises BadConfig."""
    try:
        found: Suite = from_json(Suite, data.get("suite"))
    except ValueError as error:
        raise BadConfig("this is not a suite's report", why=str(error)) from error
    return found
