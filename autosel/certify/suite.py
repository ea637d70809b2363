"""The suites: seven prompt/generation configurations of three small models, whole answers timed.

Each figure is the median of three trials after two warm-ups. A trial is an ordinary run whose stream goes on: prompt
in, so many tokens out, baseline and optimised steps in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosel.certify.certificate import Certificate
from autosel.certify.statistics import median
from autosel.decode.run import GREEDY, Plan, Sampling
from autosel.errors import BadConfig
from autosel.values import from_json, to_json

Level = Literal["quick", "standard", "full"]
LEVELS: tuple[Level, ...] = ("quick", "standard", "full")
MODELS = ("llama-1b", "qwen3-1.7b", "gemma3-1b")
FORMAT = "autosel.suite"
TRIALS = 3
WARM_UPS = 2
WARM_UP_TOKENS = 8


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    level: Level
    device: str
    hw_id: str
    env_id: str
    git_sha: str
    timestamp: str
    rows: tuple[Row, ...]


def configurations(level: Level) -> tuple[Configuration, ...]:
    """quick: the two that take seconds; standard and full: all seven."""
    return CONFIGURATIONS[:1] + CONFIGURATIONS[2:3] if level == "quick" else CONFIGURATIONS


def models(level: Level, asked: str | None) -> tuple[str, ...]:
    """The model asked for; else llama-1b, and of the full suite all three."""
    return (asked,) if asked else MODELS if level == "full" else MODELS[:1]


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


def trials(plan: Plan, measure: Callable[[Plan], Certificate]) -> list[Certificate]:
    """Two warm-ups of a few tokens, then three trials."""
    for _ in range(WARM_UPS):
        measure(replace(plan, iters=min(plan.iters, WARM_UP_TOKENS)))
    return [measure(plan) for _ in range(TRIALS)]


def under_way(what: str) -> Iterator[str]:
    """What each run of `trials` is, in its order."""
    for kind, count in (("warm-up", WARM_UPS), ("trial", TRIALS)):
        yield from (f"{what}, {kind} {number} of {count}" for number in range(1, count + 1))


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
    )


def end_to_end(made: Certificate, tokens: int) -> float:
    """Tokens per second from the prompt's arrival to the last token."""
    seconds = (made.ttft_ms or 0.0) / 1e3 + sum(made.samples.optimised_ns) / 1e9
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
