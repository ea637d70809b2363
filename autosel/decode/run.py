"""One measured decode: the request (`Plan`), the candidates (`Choice`), the result (`DecodeRun`).

These are values without torch: the command line, certificates and reports read them without loading a model.

    weights = load_weights(plan, listener)                    # decode.weights
    run = measure(plan, weights, listener=listener)           # decode.measure: a DecodeRun
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from autosel import devices
from autosel.errors import UsageError
from autosel.models.shape import ModelShape
from autosel.values import Arm, Backend, Decision, DTypeName, Fingerprint, State

Layout = Literal["contiguous", "paged"]
# Form of a step: op by op; by PyTorch alone, as the baseline; the list of ops replayed as a CUDA graph; by one native
# call or launch of the device; by that call, with lossless packed weights.
StepForm = Literal["ops", "torch", "graph", "whole", "packed"]
WHOLE: tuple[StepForm, ...] = ("whole", "packed")
EXECUTION: Mapping[StepForm, Literal["eager", "torch", "graph", "team"]] = {
    "ops": "eager",
    "torch": "torch",
    "graph": "graph",
    "whole": "team",
    "packed": "team",
}  # the first word of the mode
# How a block's input reaches its first projection: everything in one op; the residual added by the previous projection,
# then norm and projection; or residual and norm in one op, then the projection.
Form = Literal["fused", "normed", "added"]
FORMS: tuple[Form, ...] = ("fused", "normed", "added")
AskedStep = Literal["auto", "ops", "graph", "whole"]
AskedLayout = Literal["auto", "plain"]
LARGEST = {"batch": 1 << 16, "seq": 1 << 24, "iters": 10**6, "warmup": 10**6, "page": 1 << 12, "speculate": 64}


def _among(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UsageError(f"{name} {value!r} is invalid", why=f"a number from {low:g} to {high:g} is expected")


def _one_of(name: str, value: object, allowed: object) -> None:
    words = get_args(allowed)
    if value not in words:
        raise UsageError(f"{name} {value!r:.40} is invalid", why=f"one of {', '.join(words)} is expected")


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
        """Return True if a token other than the largest logit's is possible."""
        return self.temperature > 0.0 or self.repetition_penalty != 1.0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Request of a run. Raises UsageError for values that no run can have.

    `seq` counts the tokens that a timed step attends to, including the one it adds, so the prompt has seq - 1. Without
    `advance`, every timed step is the same step (the cache is rewound by a token): every sample does the same work.
    With it, the stream advances, and timed step i (from 0) attends to seq + i. `layers` below the model's own run the
    first layers and the output head.
    """

    model: ModelShape  # the whole model, for any `layers`
    layers: int = 0  # how many layers run; 0: all
    weights: str = "random"  # or a checkpoint folder, or a GGUF file
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
    layout: AskedLayout = "auto"  # auto: a whole step reads packed weights where that is faster; plain: never
    cache: Layout = "contiguous"
    page: int = 64  # tokens per page of a paged cache
    prealloc: bool = True  # ops write into preallocated buffers; off: ops allocate their results
    small_batch: bool = False  # the batch is one stream's tokens in flight: time per token = step / batch
    sampling: Sampling = GREEDY
    speculate: int = 0  # n-gram speculation: tokens drafted per step; 0: none
    device: str = devices.HOST
    seed: int = 0  # of random weights, random prompt and the coin flips that order the steps
    baseline: bool = True  # off: only the optimised arm runs, and nothing is kept for another one

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("seq", 2), ("iters", 1), ("warmup", 0), ("page", 1), ("speculate", 0)):
            _among(name, getattr(self, name), low, LARGEST[name])
        _among("layers", self.layers, 0, self.model.layers)
        _one_of("step", self.step, AskedStep)
        _one_of("layout", self.layout, AskedLayout)
        if self.dtype == "fp8_e4m3":
            raise UsageError("--dtype fp8_e4m3 is not supported", why="the decoder computes in bf16, fp16 or fp32")
        if self.longest > self.model.max_context:
            raise UsageError(
                f"--seq {self.seq}: the run reaches {self.longest} tokens",
                why=f"{self.model.name} supports contexts of at most {self.model.max_context}",
                todo="use a shorter --seq",
            )
        if not self.baseline and self.cache == "paged":
            raise UsageError(
                "--no-baseline and --paged are mutually exclusive",
                why="the passes that check the tokens read a contiguous cache",
                todo="remove one of them",
            )

    @property
    def layers_run(self) -> int:
        return self.layers or self.model.layers

    @property
    def full_layers(self) -> int:
        return self.model.layers

    @property
    def shape(self) -> ModelShape:
        """Return the model with only the layers that run."""
        types = self.model.layer_types[: self.layers_run]
        slides = "sliding" in types
        return replace(self.model, layers=self.layers_run, layer_types=types, window=self.model.window if slides else 0)

    @property
    def not_whole(self) -> str:
        """Return why no device can run a whole step of this plan, or ""."""
        if self.speculate:
            return "speculation makes steps of several tokens per sequence"
        if not self.prealloc:
            return "--no-prealloc: a whole step writes into preallocated buffers"
        return "--paged: a whole step reads a contiguous cache" if self.cache == "paged" else ""

    @property
    def listed(self) -> bool:
        """Return True if its steps are lists of calls written beforehand, so that there are several forms to choose
        from.
        """
        return not self.untimed

    @property
    def untimed(self) -> str:
        return untimed(prealloc=self.prealloc, drafts=self.speculate > 0)

    @property
    def longest(self) -> int:
        """Return the most tokens that a sequence will hold: the size of the cache."""
        return self.seq + (self.iters if self.advance else 0) + self.speculate


def untimed(*, prealloc: bool, drafts: bool) -> str:
    """Return why the ops of such steps are not timed one by one, or "": only lists of calls can be."""
    if drafts:
        return "no op was timed separately: with speculation every step is another list of calls"
    return "" if prealloc else "no op was timed separately: with --no-prealloc a step is not a list of calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The candidate of one op of the step. State `baseline`: undecided, so PyTorch's code ran."""

    op: str
    label: str  # its name in tables: `linear o`
    workload_key: str
    count_per_step: int
    backend: Backend
    candidate: str
    decision_id: int | None
    state: State | Literal["baseline"]
    reason: str = ""
    served: tuple[tuple[str, int], ...] = ()  # candidate and calls in the timed steps, by its counter


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One op's time within real steps, over all its calls of a step; bytes and FLOPs are for one call."""

    op: str
    label: str
    workload_key: str
    count_per_step: int
    median_us: float  # of one call
    bytes_moved: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call of an op, or one thread's share of a task, in one step; see decode.timeline."""

    lane: str  # thread or stream
    begin_ns: int  # since the step began
    end_ns: int
    label: str  # the op's name in tables
    site: str  # its place in the step
    also: str  # places of the other calls that a task does
    candidate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDigest:
    """Digest of the prompt: sha256 (hex) of its token ids, and of its file's bytes; see decode.prompt."""

    tokens_sha256: str
    file_sha256: str = ""  # empty: drawn tokens, no file


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to score, in token ids. `tokenizer`: "checkpoint", "ids" (from the file) or "bytes"."""

    name: str
    sha256: str  # of the file
    tokenizer: str
    tokens: tuple[int, ...]


FEWEST_TOKENS = 4096  # to judge a format: 512 would leave +-1.2 points of top-1 agreement at 92 %
MOST_WAITED = 0.1  # of the timed pairs: so few disturbed ones are beyond the interval of a median
SUSPICION = 3.3  # standard errors: about one honest path in two thousand exceeds this by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Scores of the timed path and the fp32 reference on a text: nats per token, see decode.quality."""

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
    same_first: float  # share of positions where both have the same most likely token

    @property
    def suspect(self) -> bool:
        """Return True if the path is better than the reference beyond noise, which means a counting error."""
        return suspect(self.difference, self.difference_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatQuality:
    """Scores of the timed path, whose weights are codes, and of the original model on a text; see decode.quality."""

    original: str  # its folder or file
    stored: str  # how the original's weights are stored, if not in an ordinary dtype; else ""
    tokens: int
    perplexity: float
    original_perplexity: float
    difference: float  # nats per token
    difference_error: float
    mean_divergence: float
    p999_divergence: float  # the divergence that 99.9 % of the tokens do not exceed
    max_divergence: float
    same_first: float


def suspect(difference: float, error: float) -> bool:
    return difference < -SUSPICION * error and difference < 0


Half = Literal["attn", "mlp"]
HALVES: tuple[Half, Half] = ("attn", "mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One form of half of every layer, and the whole step's time with it, the other half as chosen; or a form of the
    step.

    `fused`: one op from the block's input through its first projection. `normed`: norm and projection separate.
    `added`: residual and norm in one op, then the projection. `ops`: op by op, in the chosen chain. `torch`: by PyTorch
    alone, as the baseline. `graph`: replayed. `team`: the device runs it whole, by one native call or launch. `packed`:
    the same with lossless packed weights.

    Certificates use these words; `Way.of_step` maps a form of the step to them.
    """

    half: Half | Literal["step"]
    form: Literal["fused", "normed", "added", "ops", "torch", "graph", "team", "packed"]
    step_us: float  # median of a few whole steps, in turn with the other forms
    taken: bool

    @staticmethod
    def of_step(form: StepForm, step_us: float, *, taken: bool) -> Way:
        return Way(half="step", form="team" if form == "whole" else form, step_us=step_us, taken=taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The ops of a step's halves. A sandwich of norms (Gemma) leaves no residual for a projection to add."""

    attn: Form = "fused"
    mlp: Form = "fused"


FUSED = Chain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The whole forms that a device has for the steps of a plan.

    `refused` says why others are impossible, perhaps only now. `arms` are the forms' names in the ledger, if it is
    used.
    """

    forms: tuple[StepForm, ...] = ()
    refused: Mapping[StepForm, str] = field(default_factory=dict)
    arms: Mapping[StepForm, Arm] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The chosen form of the steps. A whole step always uses the fused chain.

    `ways` are the raced forms with times. `note` says why other forms did not take part, or which decision chose this
    one; `decision` is that decision.
    """

    form: StepForm = "ops"
    chain: Chain = FUSED
    ways: tuple[Way, ...] = ()
    note: str = ""
    decision: Decision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRun:
    """The baseline's part of a run. Step i of both arms is the same step: same tokens, same context."""

    ns: tuple[int, ...]
    optimised_first: tuple[bool, ...]  # the coin flip of each pair's order
    ttft_ns: int | None  # prompt in, first token out; None for a synthetic prompt
    host_ns: tuple[int, ...] = ()  # until the tokens of each step were on the host; empty if the host times steps


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Result of one run. It has raw times, so that each reader does the arithmetic.

    `bytes_per_step` counts each weight and each cached key and value in reach once, and what is written: the
    traffic of the memory bus. A read probe of about twenty windows precedes each pair: `read_probes[i]` is the median
    window before pair i, the memory's rate at that time (rates on a shared machine vary by 2-4x); `read_bytes_per_s` is
    the best window, the physical ceiling of this run.
    """

    plan: Plan
    fingerprint: Fingerprint
    # `eager.t2.highest`: the key of decisions; `team.t2.highest` for a whole step
    mode_key: str
    started_at: str  # UTC, ISO 8601
    seconds: float  # the whole measurement, without loading
    optimised_ns: tuple[int, ...]
    baseline: BaselineRun | None  # None: only the optimised arm ran
    kept: tuple[int, ...]  # tokens per sequence from each optimised step; above 1 only with speculation
    ttft_ns: int | None  # prompt in, first token out; None for a synthetic prompt
    prompt_tokens: int  # per sequence
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
    # Chosen from the same state as the baseline's, or as PyTorch's without one; with speculation, all kept tokens.
    tokens_checked: int
    tokens_equal: int
    # the optimised path's largest error of logits, or the error that the choice of a differing token needs
    max_logit_error: float
    logit_bound: float  # allowed error
    # Share of a median optimised step: the time that Python needs for its list, with every op doing nothing (for a
    # whole step: a call with nothing to do). None if the step is neither (--no-prealloc, speculation).
    python_overhead_share: float | None
    tokens_open: int = 0  # judged tokens that differ but may: the bound does not decide their order
    timed_by: Literal["host", "CUDA events"] = "host"  # clock of the step times
    optimised_host_ns: tuple[int, ...] = ()  # until the tokens of each step were on the host; empty if the host times
    chosen: Chosen = Chosen()  # the form of its steps
    quality: Quality | None = None  # if a text was given
    format_quality: FormatQuality | None = None  # if an original was given with the text
    waited: int = 0  # timed pairs of steps during which a thread waited for a core that another process used
    saved_bytes: int = 0  # bytes that the optimised step reads less than the baseline, because weights are packed
    timeline: tuple[Span, ...] = ()  # of one optimised step, if it was asked for
    energy_joules: float | None = None  # of the optimised steps, if the machine measures it (devices.energy)
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def ways(self) -> tuple[Way, ...]:
        """Return the forms that were raced; empty if none were."""
        return self.chosen.ways

    @property
    def contended(self) -> bool:
        """Return True if other processes disturbed so many pairs that they can shift a median."""
        return self.waited > MOST_WAITED * len(self.kept)

    @property
    def tokens_per_step(self) -> float:
        return sum(self.kept) / len(self.kept)


class Listener(Protocol):
    """Listener of a run's progress."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...


class Silent:
    """Listener that does nothing."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...
