"""The suites: seven prompt/generation configurations of three small models, whole answers timed.

Each figure is the median of eight trials after a warm-up; answers of the quick suite are shorter. The trials are the
blocks of a speedup's interval. A trial is an ordinary run whose stream goes on: prompt in, so many tokens out, baseline
and optimised steps in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosel.certify.certificate import Certificate
from autosel.certify.statistics import Interval, median, trials_interval
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
    """How much a level measures. `shorter`: so many times shorter are its answers. `decides`: how steps are taken is
    asked for each configuration, and who takes whole ones raced for the ledger where nothing says so; else it is asked
    once for each layout of the cache."""

    models: tuple[str, ...] = MODELS[:1]
    layers: int = 0  # unless others are asked for; 0: all
    shorter: int = 1
    warm_ups: int = 1
    trials: int = 8  # the fewest that give an interval
    decides: bool = True


LEVELS: Mapping[Level, Extent] = {
    "quick": Extent(layers=4, shorter=16, decides=False),
    "standard": Extent(),
    "full": Extent(models=MODELS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """`prompt` tokens in, `tokens` out, the first of them by the prompt's own pass."""

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
class Row:
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
    speedup_interval: Interval | None = None  # trials are its blocks; None of fewer than eight
    e2e_trials: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    level: Level
    device: str
    hw_id: str
    env_id: str
    git_sha: str
    timestamp: str
    rows: tuple[Row, ...]
    trials: int = 3
    left: int = 0  # rows that were not measured: somebody stopped it
    notes: tuple[str, ...] = ()  # what was noted of the device, as each row's certificate says too


def configurations(level: Level) -> tuple[Configuration, ...]:
    """All seven; of the quick suite with shorter answers."""
    shorter = LEVELS[level].shorter
    return tuple(replace(c, tokens=max(min(c.tokens, LEAST_TOKENS), c.tokens // shorter)) for c in CONFIGURATIONS)


def models(level: Level, asked: str | None) -> tuple[str, ...]:
    """The model asked for; else llama-1b, and of the full suite all three."""
    return (asked,) if asked else LEVELS[level].models


def layers(level: Level, asked: int | None, of: int) -> int:
    """How many of a model's layers run; 0: all."""
    found = min(of, asked or LEVELS[level].layers)
    return 0 if found == of else found


def plan_of(base: Plan, c: Configuration) -> Plan:
    """The run that a trial is. `base` carries model, layers, dtype, weights and device."""
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
    """A warm-up or a trial. `title` tells it from every other run of its suite."""

    title: str
    plan: Plan
    counts: bool


def runs(c: Configuration, plan: Plan, extent: Extent) -> tuple[Run, ...]:
    """Warm-ups of a few tokens, then the trials, which count."""
    what = f"{plan.model.name} {c.name} {c.prompt}/{c.tokens}"
    short = replace(plan, iters=min(plan.iters, WARM_UP_TOKENS))
    warm = [_run(f"{what}, warm-up", i, extent.warm_ups, short, counts=False) for i in range(extent.warm_ups)]
    return (*warm, *(_run(f"{what}, trial", i, extent.trials, plan, counts=True) for i in range(extent.trials)))


def _run(kind: str, number: int, of: int, plan: Plan, *, counts: bool) -> Run:
    title = f"{kind} {number + 1} of {of}" if of > 1 else kind
    return Run(title=title, plan=plan, counts=counts)


def row(c: Configuration, made: Sequence[Certificate]) -> Row:
    """The median of the trials, figure by figure."""

    def middle(figure: Callable[[Certificate], float]) -> float:
        return median([figure(one) for one in made])

    return Row(
        model=made[0].model,
        dtype=made[0].dtype,
        configuration=c.name,
        prompt=c.prompt,
        tokens=c.tokens,
        e2e_tokens_per_s=middle(lambda one: end_to_end(one, c.tokens)),
        decode_tokens_per_s=middle(lambda one: one.sustained_tokens_per_sec),
        p50_step_ms=middle(lambda one: one.latency_ms.med),
        p95_step_ms=middle(lambda one: one.latency_ms.p95),
        ttft_ms=middle(lambda one: one.ttft_ms or 0.0),
        speedup=middle(lambda one: one.speedup),
        cache_bytes=made[0].kv_cache_bytes,
        peak_memory_bytes=max(one.peak_memory_bytes for one in made),
        speedup_interval=trials_interval([one.speedup for one in made]),
        e2e_trials=tuple(end_to_end(one, c.tokens) for one in made),
    )


def end_to_end(made: Certificate, tokens: int) -> float:
    """Tokens per second from the prompt's arrival to the last token."""
    steps = made.samples.optimised_host_ns or made.samples.optimised_ns
    seconds = (made.ttft_ms or 0.0) / 1e3 + sum(steps) / 1e9
    return made.shape.batch * tokens / seconds


def document(suite: Suite) -> dict[str, object]:
    return {"format": FORMAT, "version": 1, "suite": to_json(suite)}


def from_document(data: Mapping[str, object]) -> Suite:
    """Raises BadConfig."""
    try:
        found: Suite = from_json(Suite, data.get("suite"))
    except ValueError as error:
        raise BadConfig("this is not a suite's report", why=str(error)) from error
    return found
