"""One measured decode: what was asked (`Plan`), what served it (`Choice`), what came out (`DecodeRun`).

Values alone, free of torch: the command line, the certificate and a report read them without loading a model.

    weights = load_weights(plan, listener)                    # decode.weights
    run = measure(plan, weights, listener=listener)           # decode.measure: a DecodeRun
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

from autosel.errors import UsageError
from autosel.models.shape import ModelShape
from autosel.values import Arm, Backend, Decision, DTypeName, Fingerprint, State

Layout = Literal["contiguous", "paged"]
# How a step is run: op by op; by PyTorch alone, as the baseline is; the list of ops replayed as a CUDA graph; by one
# native call or launch of the device; by that, from weights packed without loss.
StepForm = Literal["ops", "torch", "graph", "whole", "packed"]
WHOLE: tuple[StepForm, ...] = ("whole", "packed")
EXECUTION: Mapping[StepForm, Literal["eager", "torch", "graph", "team"]] = {
    "ops": "eager",
    "torch": "torch",
    "graph": "graph",
    "whole": "team",
    "packed": "team",
}  # the first word of the mode
# How a block's input becomes its first projection: everything in one op; the residual added by the projection before,
# then norm and projection apart; or residual and norm in one op, then the projection.
Form = Literal["fused", "normed", "added"]
FORMS: tuple[Form, ...] = ("fused", "normed", "added")
AskedStep = Literal["auto", "ops", "graph", "whole"]
AskedLayout = Literal["auto", "plain"]
LARGEST = {"batch": 1 << 16, "seq": 1 << 24, "iters": 10**6, "warmup": 10**6, "page": 1 << 12, "speculate": 64}


def _among(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(f"{name} {value!r}", why=f"a number from {low:g} to {high:g} is expected")


def _one_of(name: str, value: object, allowed: object) -> None:
    words = get_args(allowed)
    if value not in words:
        raise UsageError(f"{name} {value!r:.40}", why=f"one of {', '.join(words)} is expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0, top_p 1 and penalty 1 change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _among("temperature", self.temperature, 0.0, 100.0)
        _among("top-k", self.top_k, 0, 1 << 22)
        _among("top-p", self.top_p, 0.0, 1.0)
        _among("repetition penalty", self.repetition_penalty, 0.01, 100.0)

    @property
    def changes_greedy(self) -> bool:
        """Is any token other than the largest logit's possible?"""
        return self.temperature > 0.0 or self.repetition_penalty != 1.0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. Raises UsageError for what no run can be.

    `seq` counts the tokens that a timed step attends to, the one it adds included, so the prompt has seq - 1. With
    `advance` off each timed step is that very step (the cache is rewound by a token): every sample does the same work.
    With it on the stream goes on, and timed step i (from 0) attends to seq + i. `layers` below the model's own run the
    first so many and the output head.
    """

    model: ModelShape  # the whole model, whatever `layers` says
    layers: int = 0  # how many of them run; 0: all
    weights: str = "random"  # or a checkpoint folder
    # "random" tokens, run through the model; "synthetic": the cache is filled with random keys and values instead, and
    # no time to first token is measured; or a file of token ids, or of text (needs the checkpoint's tokenizer)
    prompt: str = "random"
    dtype: DTypeName = "bf16"
    batch: int = 1  # sequences that share a step
    seq: int = 128
    iters: int = 100
    warmup: int = 10
    advance: bool = False
    step: AskedStep = "auto"  # the form of the step; auto: a decision or a race chooses
    layout: AskedLayout = "auto"  # auto: a whole step reads packed weights where that is faster; plain: it never does
    cache: Layout = "contiguous"
    page: int = 64  # tokens a page of a paged cache
    prealloc: bool = True  # every op writes into buffers made once; off: ops allocate their results
    small_batch: bool = False  # the batch stands for one stream's tokens in flight: time per token = step / batch
    sampling: Sampling = GREEDY
    speculate: int = 0  # n-gram speculation: tokens drafted a step; 0: none
    device: str = "cpu"
    seed: int = 0  # of random weights, random prompt and the coins that order the steps

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("seq", 2), ("iters", 1), ("warmup", 0), ("page", 1), ("speculate", 0)):
            _among(name, getattr(self, name), low, LARGEST[name])
        _among("layers", self.layers, 0, self.model.layers)
        _one_of("step", self.step, AskedStep)
        _one_of("layout", self.layout, AskedLayout)
        if self.dtype == "fp8_e4m3":
            raise UsageError("--dtype fp8_e4m3", why="the decoder computes in bf16, fp16 or fp32")
        if self.longest > self.model.max_context:
            raise UsageError(
                f"--seq {self.seq}: the run reaches {self.longest} tokens",
                why=f"{self.model.name} was made for contexts of at most {self.model.max_context}",
                todo="use a shorter --seq",
            )

    @property
    def layers_run(self) -> int:
        return self.layers or self.model.layers

    @property
    def full_layers(self) -> int:
        return self.model.layers

    @property
    def shape(self) -> ModelShape:
        """The model cut to the layers that run."""
        types = self.model.layer_types[: self.layers_run]
        slides = "sliding" in types
        return replace(self.model, layers=self.layers_run, layer_types=types, window=self.model.window if slides else 0)

    @property
    def not_whole(self) -> str:
        """Why no device can take a step of this plan whole, or ""."""
        if self.speculate:
            return "drafts make steps of several tokens a sequence"
        if not self.prealloc:
            return "--no-prealloc: a whole step writes into buffers made beforehand"
        return "--paged: a whole step reads a contiguous cache" if self.cache == "paged" else ""

    @property
    def listed(self) -> bool:
        """Are its steps lists of calls that are written beforehand? Then there are several forms to choose from."""
        return not self.untimed

    @property
    def untimed(self) -> str:
        return untimed(prealloc=self.prealloc, drafts=self.speculate > 0)

    @property
    def longest(self) -> int:
        """The most tokens a sequence will hold: the cache's size."""
        return self.seq + (self.iters if self.advance else 0) + self.speculate


def untimed(*, prealloc: bool, drafts: bool) -> str:
    """Why the ops of such steps are not timed one by one, or "": only a list of calls can be."""
    if drafts:
        return "no op was timed by itself: drafts make every step another list of calls"
    return "" if prealloc else "no op was timed by itself: with --no-prealloc a step is no list of calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What served one op of the step. `baseline`: nothing is decided, so PyTorch's way ran."""

    op: str
    label: str  # its name in tables: `gemv o`
    workload_key: str
    count_per_step: int
    backend: Backend
    candidate: str
    decision_id: int | None
    state: State | Literal["baseline"]
    reason: str = ""
    served: tuple[tuple[str, int], ...] = ()  # candidate and calls, as its counter says of the timed steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One op's time within real steps, over all its calls of a step; bytes and FLOPs are those of one call."""

    op: str
    label: str
    workload_key: str
    count_per_step: int
    median_us: float  # of one call
    bytes_moved: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDigest:
    """Which prompt was run: sha256 (hex) of its token ids, and of its file's bytes; see decode.prompt."""

    tokens_sha256: str
    file_sha256: str = ""  # empty: no file was named, the tokens were drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to be scored, in token ids. `tokenizer`: "checkpoint", "ids" (the file held them) or "bytes"."""

    name: str
    sha256: str  # of the file
    tokenizer: str
    tokens: tuple[int, ...]


SUSPICION = 3.3  # standard errors: about one honest path in two thousand is as much better by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What the timed path and the fp32 reference made of a text: nats a token, see decode.quality."""

    text: str
    text_sha256: str
    tokenizer: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    difference: float
    difference_error: float
    mean_divergence: float
    max_divergence: float
    same_first: float  # share of positions at which both find the same token likeliest

    @property
    def suspect(self) -> bool:
        """Better than the reference beyond noise? Rounding cannot know the text: something is counted wrongly."""
        return suspect(self.difference, self.difference_error)


def suspect(difference: float, error: float) -> bool:
    return difference < -SUSPICION * error and difference < 0


Half = Literal["attn", "mlp"]
HALVES: tuple[Half, Half] = ("attn", "mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make one half of every layer, and what the whole step took with it, the other half as it was chosen;
    or, of the step itself, one way to run it.

    `fused`: one op from the block's input through its first projection. `normed`: norm and projection apart. `added`:
    residual and norm in one op, then the projection. `ops`: op by op, in the chosen forms. `torch`: by PyTorch alone,
    as the baseline is. `graph`: replayed. `team`: the device takes it whole, by one native call or launch. `packed`:
    the same, its weights packed without loss.
    A certificate has these words; `Way.of_step` gives them for a form of the step.
    """

    half: Half | Literal["step"]
    form: Literal["fused", "normed", "added", "ops", "torch", "graph", "team", "packed"]
    step_us: float  # median of a few whole steps, in turn with the other forms
    taken: bool

    @staticmethod
    def of_step(form: StepForm, step_us: float, *, taken: bool) -> Way:
        """One form of the whole step."""
        return Way(half="step", form="team" if form == "whole" else form, step_us=step_us, taken=taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Which ops a step is made of. A sandwich of norms (Gemma) leaves no residual for a projection to add."""

    attn: Form = "fused"
    mlp: Form = "fused"


FUSED = Chain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The whole forms that a device has for the steps of a plan. `refused`: why others cannot be taken, or not now.
    `arms`: what the ledger calls the forms, where it is asked about a step."""

    forms: tuple[StepForm, ...] = ()
    refused: Mapping[StepForm, str] = field(default_factory=dict)
    arms: Mapping[StepForm, Arm] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """How steps are taken. `ways`: what was raced for it, with times; `note`: why other forms did not take part, or by
    which decision this one was chosen; `decision`: that one. A whole step is always made of the fused chain."""

    form: StepForm = "ops"
    chain: Chain = FUSED
    ways: tuple[Way, ...] = ()
    note: str = ""
    decision: Decision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """What one run measured. Raw times, so that whoever reads them does the arithmetic.

    Step i of both arms is the same step: same tokens fed, same context; `optimised_first[i]` is the coin that ordered
    them. `bytes_per_step` counts each weight, each cached key and value in reach, once, and what is written: what must
    cross the memory bus. A read probe of some twenty windows comes before each pair: `read_probes[i]` is the median
    window before pair i, what memory gave just then (rates on a shared machine move by 2-4x); `read_bytes_per_s` is the
    best window of all, the physical ceiling of this run.
    """

    plan: Plan
    fingerprint: Fingerprint
    # `eager.t2.highest`: what decisions were looked up under; `team.t2.highest` where the device took it whole
    mode_key: str
    started_at: str  # UTC, ISO 8601
    seconds: float  # the whole measurement, loading left out
    optimised_ns: tuple[int, ...]
    baseline_ns: tuple[int, ...]
    optimised_first: tuple[bool, ...]
    kept: tuple[int, ...]  # tokens of a sequence that each optimised step gave; above 1 only by speculation
    ttft_ns: int | None  # prompt in, first token out; None for a synthetic prompt
    baseline_ttft_ns: int | None
    prompt_tokens: int  # that the two times above are for, a sequence
    prompt: PromptDigest | None  # None for a synthetic prompt
    bytes_per_step: int
    flops_per_step: int
    weights_bytes: int
    kv_cache_bytes: int  # allocated
    peak_memory_bytes: int
    read_bytes_per_s: float
    read_probes: tuple[float, ...]
    choices: tuple[Choice, ...]
    per_op: tuple[OpTime, ...]
    tokens_checked: int  # chosen by both arms from the same state; of speculation, all that were kept
    tokens_equal: int
    # the optimised path's largest distance from the reference logits, or what a differing token needs to be chosen
    max_logit_error: float
    logit_bound: float  # what it may be
    # Of a median optimised step: what Python takes to go through its list, every op doing nothing (of a whole step:
    # to call it with nothing to do). None where the step is neither (--no-prealloc, speculation).
    python_overhead_share: float | None
    tokens_open: int = 0  # that differ, were judged, and may: the bound leaves their order open
    timed_by: Literal["host", "CUDA events"] = "host"  # what the times of steps are by
    # Until the tokens of each step were on the host; empty where steps are timed by the host.
    optimised_host_ns: tuple[int, ...] = ()
    baseline_host_ns: tuple[int, ...] = ()
    chosen: Chosen = Chosen()  # how its steps were taken
    quality: Quality | None = None  # where a text was given
    saved_bytes: int = 0  # what the optimised step reads less than the baseline's: its weights are packed
    energy_joules: float | None = None  # of the optimised steps, where the machine tells (decode.power)
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def ways(self) -> tuple[Way, ...]:
        """What was raced to choose how steps are taken; empty: nothing was."""
        return self.chosen.ways

    @property
    def tokens_per_step(self) -> float:
        """Of a sequence."""
        return sum(self.kept) / len(self.kept)


class Listener(Protocol):
    """Who wants to know how it goes."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...


class Silent:
    """A listener that says nothing."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...


class Measure(Protocol):
    """`decode.measure.measure`: both arms interleaved in one run. `clock` gives nanoseconds.

    Raises UsageError (what cannot be run), BadConfig (weights or prompt that cannot be read), AutoselError.
    """

    def __call__(self, plan: Plan, weights: Any, *, listener: Listener = ..., clock: Any = ...) -> DecodeRun: ...
