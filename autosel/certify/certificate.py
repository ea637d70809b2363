"""The certificate: one decode run as a document whose derived figures can all be recomputed from the rest of it.

A line of a JSONL file is the RFC 8785 spelling of a `Certificate`: one document, one sequence of bytes. `checksum` is
the sha256 over that spelling of everything except itself and `signature`. `field_digests` has eight hex digits for each
field: if the checksum is wrong, they show which field was edited.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from autosel.certify.slo import AskedObjective, Judged
from autosel.certify.statistics import Interval
from autosel.values import LATER, Scalar, canonical_json, from_json, parse_json, to_json

FORMAT = "autosel.certificate"
VERSION = 6
# 3: tokens that differ were counted, not judged. Before 5: no digest of the prompt. Before 6: no description of a model
# other than a preset, nor of the hardware behind `hw_id`; a speculative run's speedup counts steps instead of tokens;
# the host timed GPUs.
READ = (3, 4, 5, VERSION)
# Later fields, and the version that added them.
SINCE = {"prompt": 5, **dict.fromkeys(("identity", "architecture", "timed_by", "host_ms", "baseline_host_ms"), 6)}
SINCE["baseline_tokens_per_sec"] = 6
MOST_BYTES = 2 << 20  # of a line
MOST_STEPS = 20_000  # the most whose times fit into a line
UNSEALED = ("field_digests", "checksum", "signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Step time in milliseconds: the median, and the time that 95 % of the steps do not exceed."""

    med: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Time between two tokens of a sequence, milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Number of layers that ran, and of the model."""

    run: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a run. `seq` is the tokens that a timed step attends to, its own included; capitals as in workloads."""

    batch: int
    seq: int
    prompt: int
    d: int
    Hq: int
    Hkv: int
    D: int
    I: int
    V: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Digests (sha256) of the prompt, which an owner of the prompt can compute again."""

    tokens_sha256: str  # of the token ids that ran, a list a sequence, as JSON without spaces: `[[1,2],[3,4]]`
    file_sha256: str  # of the bytes of the file that was named; empty: the tokens were drawn from the seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmProof:
    """The parity that an arm passed before it could serve."""

    cases: int
    worst: float
    worst_case: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The second fastest candidate when this op was decided, and its time over the winner's."""

    candidate: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFigures:
    """One op of the step. `median_us`, `bytes` and `flops` are for one of its `calls`; None if it was not timed.

    `served` maps candidates to calls in the timed steps, counted by the callables themselves.
    """

    op: str
    workload: str  # workload key
    calls: int  # per step
    median_us: float | None
    bytes: int | None
    flops: int | None
    candidate: str  # the one that served when the run ended
    baseline: str  # the candidate to beat; empty: nothing is decided, so it runs
    state: str  # promoted, kept, pinned, or baseline
    decision_id: int | None
    parity: ArmProof | None  # None: no proof of this arm is known here
    runner_up: RunnerUp | None
    served: Mapping[str, int]  # counted calls by candidate; empty: the mode does not count single calls
    reason: str = ""  # why the baseline serves without a decision; empty before version 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FormTime:
    """Time of the whole step with one half of each layer in one form; see decode.run.Way."""

    half: str
    form: str
    step_us: float
    taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Every timed step in nanoseconds. Step i of both arms is the same step; `first[i]` is 1 if the optimised one ran
    first. Without a baseline, `baseline_ns` and `first` are empty.

    `optimised_host_ns` and `baseline_host_ns` end when the step's tokens are on the host; empty if `timed_by` is the
    host. `kept` counts the tokens of a sequence from each optimised step; empty means one.
    """

    optimised_ns: tuple[int, ...]
    baseline_ns: tuple[int, ...]
    first: str
    optimised_host_ns: tuple[int, ...] = ()
    baseline_host_ns: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison of both arms from the same state: tokens that agreed, and the logits' distance from the reference.

    `against` names the other arm: the baseline's steps, or without one, untimed passes of PyTorch that convert some
    rows of a weight at a time.
    """

    tokens_checked: int
    tokens_equal: int
    max_logit_error: float  # or half of the distance of a differing token's logit below the largest
    logit_bound: float
    # tokens that differ but may, because the bound does not decide which is larger; None in version 3, which did not
    # judge
    tokens_open: int | None = None
    against: Literal["baseline", "passes"] = field(default="baseline", metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstBaseline:
    """The baseline's step in milliseconds, and the speedup over it with its 95 % interval."""

    med: float
    p95: float
    tokens_per_sec: float
    speedup: float
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """Energy and price; None if the energy could not be read (the notes give the reason) or no price was given.

    The energy is that of whole CPU packages or of the GPU's board over the optimised steps, neighbours included.
    """

    price_per_hour: float | None
    energy_joules: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Paid):
    """Cost of the tokens."""

    tokens_per_watt_hour: float | None
    tokens_per_dollar: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Ed25519 signature of the checksum, by the key whose public half is the certificate's `signer`."""

    algorithm: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured and stated facts of one decode run, which follow from nothing else.

    Times in milliseconds, rates in bytes and FLOPs per second.
    """

    # which run
    format: str  # always `autosel.certificate`
    version: int  # of the format
    timestamp: str  # when the run began, UTC
    repro_cmd: str  # the command that runs it again
    git_sha: str  # of the checkout that ran, with `-dirty` if it was edited; empty for an installed wheel
    # what ran where
    device: str  # its name
    sm: str  # compute capability, or a CPU's instruction set
    hw_id: str  # digest of the hardware's identity: decisions are looked up under it
    env_id: str  # digest of the software's
    environment: Mapping[str, Any]  # versions of Python, torch, compiler, driver, libraries
    identity: Mapping[str, Any] | None = None  # the hardware's identity, whose digest is `hw_id`; None before version 6
    contended: bool  # other work ran, or it was slowed, when rates or more than a tenth of the steps were measured
    model: str  # includes the layers in its name if not all ran
    layers: Layers  # how many ran, and how many there are
    architecture: Mapping[str, Any] | None = None  # of the whole model (see ModelShape); None: before version 6
    dtype: str  # of weights, activations and cache
    weights: str  # `random`, or the checkpoint's folder
    shape: Shape  # batch, context, prompt, and the model's dimensions
    mode: str  # the key of decisions: execution, threads, numeric flags
    options: Mapping[str, Scalar]  # options of the run
    prompt: Prompt | None = None  # digests of its tokens and file; None: no prompt ran, or before version 5
    # how it was timed
    warmup: int  # untimed steps before the timed ones, without those for the guard's first checks
    timed_by: str = "host"  # or `CUDA events`: from before a step's first kernel until its tokens are chosen
    samples: Samples  # every timed step: all times below follow from them
    ttft_ms: float | None  # prompt to first token; None: the cache was filled without a prompt
    baseline_ttft_ms: float | None  # the baseline's
    cost: Paid
    slo: tuple[AskedObjective, ...]
    # against the limits of the device
    bytes_per_step: int  # bytes that must cross the memory bus: weights, and keys and values in reach, once
    flops_per_step: int  # a multiply-add counts as two
    read_bytes_per_s: float  # the best window of all probes: the ceiling
    read_probes: tuple[float, ...]  # read rate of memory just before each pair of steps
    peak_flops: float  # measured arithmetic rate of the dtype, all cores; 0: not measured
    cache_bytes: int  # last-level cache: bytes that a step may read without memory
    weights_bytes: int  # of all weights that ran
    kv_cache_bytes: int  # allocated
    peak_memory_bytes: int  # of the process so far (in a suite: since the run began), or of the GPU
    python_overhead: float | None  # share of a step; None: not measured separately
    # with which decisions
    autosel: Mapping[str, str]  # op -> backend
    knobs: Mapping[str, Mapping[str, Scalar]]  # op -> the settings of the kernel that served it
    per_op: Mapping[str, OpFigures]  # op -> what served it, how often, its time and proof
    ways: tuple[FormTime, ...]  # each half of a layer in each form, and the time of the whole step with it
    # how right
    verification: Verification  # tokens and logits of both arms, from the same states
    quality: Mapping[str, Scalar] | None  # of a scored text (see Quality); None: no text was given
    format_quality: Mapping[str, Scalar] | None = field(default=None, metadata=LATER)  # of codes, against the original
    notes: tuple[str, ...]  # notes for the reader


@dataclass(frozen=True, kw_only=True)  # without slots: a class can inherit slots from only one base
class Derived:
    """Figures that `derive` computes from the measured ones. Times in milliseconds, rates in tokens and bytes per
    second.
    """

    # how fast: computed from the samples
    iters: int  # timed steps of each arm
    latency_ms: Latency  # of an optimised step
    latency_interval_ms: Interval  # 95 % interval of its median
    # median step of eager PyTorch with SDPA, interleaved in the same run; None, like all that follows from it: no
    # baseline ran
    baseline_ms: float | None
    baseline_p95_ms: float | None  # the time that 95 % of its steps do not exceed
    host_ms: float | None = None  # median until an optimised step's tokens are on the host; None: equals latency_ms
    baseline_host_ms: float | None = None  # the baseline's
    speedup: float | None  # tokens_per_sec / baseline_tokens_per_sec
    speedup_interval: Interval | None  # 95 % interval
    tokens_per_sec: float  # 1000 * batch * tokens_per_step / latency_ms.med
    baseline_tokens_per_sec: float | None = 0.0  # 1000 * batch / baseline_ms
    peak_tokens_per_sec: float  # of the fastest step
    sustained_tokens_per_sec: float  # all tokens over the sum of all steps
    tokens_per_step: float  # of a sequence; above 1 only with speculation
    itl_ms: Gaps  # between two tokens of a sequence
    cost: Cost  # of tokens, if power or a price is known
    slo: tuple[Judged, ...]  # requested objectives, the measured values, and if they are met
    # what else follows
    bytes_per_token: float  # bytes_per_step over the tokens of a step
    read_median_bytes_per_s: float  # median of read_probes
    roofline: float  # share of a step that reading its bytes takes at the rate just before it
    decision_ids: tuple[int, ...]  # of the ledger, all that served
    verification_ok: bool  # logits and tokens are within their bound, and every arm except the baseline is proven


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(Derived, Measured):
    """One decode run: measured fields, derived fields, and the seal.

    The comments after the fields are their documentation: docs/decode.md is generated from them.
    """

    # which line of its file
    sequence: int  # its line in the file, from 1
    previous: str  # the checksum of the previous line; empty on the first
    # the seal, which reveals edits
    signer: str  # public key (hex); empty: unsigned
    field_digests: Mapping[str, str]  # eight hex digits a field: they show which one was edited
    checksum: str  # sha256 of the RFC 8785 bytes of everything except itself and the signature
    signature: Signature | None  # Ed25519 over the checksum; None: unsigned

    @staticmethod
    def of(measured: Measured, derived: Derived) -> Certificate:
        """Return an unsealed certificate for the first line of a file."""
        sealing: dict[str, Any] = {"signer": "", "field_digests": {}, "checksum": "", "signature": None}
        return Certificate(**(values(measured) | values(derived)), sequence=1, previous="", **sealing)

    @property
    def baseline(self) -> AgainstBaseline | None:
        """Return the figures of the baseline and over it; None if none ran. `verify` refuses a certificate with only
        some of them.
        """
        if self.baseline_ms is None or self.baseline_p95_ms is None or self.baseline_tokens_per_sec is None:
            return None
        if self.speedup is None or self.speedup_interval is None:
            return None
        return AgainstBaseline(
            med=self.baseline_ms,
            p95=self.baseline_p95_ms,
            tokens_per_sec=self.baseline_tokens_per_sec,
            speedup=self.speedup,
            interval=self.speedup_interval,
        )


def values(made: Measured | Derived) -> dict[str, Any]:
    """Return all fields by name."""
    return {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}


FIELDS = tuple(f.name for f in dataclasses.fields(Certificate))
REQUIRED = tuple(f.name for f in dataclasses.fields(Certificate) if not f.metadata.get("later"))


def model_name(name: str, layers: Layers) -> str:
    """Return `llama-8b`, or `llama-8b[4/32 layers]`: a part never has the name of the whole."""
    return name if layers.run == layers.of else f"{name}[{layers.run}/{layers.of} layers]"


def another_prompt(one: Prompt | None, other: Prompt | None) -> bool:
    """Return True if both have digests, and the digests show different tokens."""
    return one is not None and other is not None and one.tokens_sha256 != other.tokens_sha256


def seal(made: Certificate) -> Certificate:
    """Return the certificate with new field digests and checksum, without signature."""
    digests = field_digests(to_json(made))
    bare = dataclasses.replace(made, field_digests=digests, checksum="", signature=None)
    return dataclasses.replace(bare, checksum=checksum(to_json(bare)))


def field_digests(document: Mapping[str, Any]) -> dict[str, str]:
    """Return eight hex digits for each field. They locate an edit; the checksum proves that there was none."""
    sealed = {name: value for name, value in document.items() if name not in UNSEALED}
    return {name: sha256(canonical_json(value)).hexdigest()[:8] for name, value in sealed.items()}


def checksum(document: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of the RFC 8785 bytes of everything except the checksum and the signature."""
    rest = {name: value for name, value in document.items() if name not in ("checksum", "signature")}
    return sha256(canonical_json(rest)).hexdigest()


def encode(made: Certificate) -> bytes:
    """Return the certificate's line, without the newline."""
    return canonical_json(made)


def decode(line: bytes) -> Certificate:
    """Return the certificate on a line; bytes and seal are checked, figures are not. Raises ValueError that names the
    field.
    """
    if len(line) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    document = parse_json(line, what="the line")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'not a certificate: its "format" is not "{FORMAT}"')
    if document.get("version") not in READ:
        raise ValueError(f"version {document.get('version')!r:.40}; this autosel reads {READ[0]} to {READ[-1]}")
    _refuse_broken_seal(document)
    missing = [name for name in REQUIRED if name not in document and SINCE.get(name, 0) <= document["version"]]
    if missing:
        raise ValueError(f"field {missing[0]} is missing")
    made: Certificate = from_json(Certificate, document)
    if canonical_json(document) != line:
        raise ValueError("not the one spelling of its content (RFC 8785)")
    return made


def _refuse_broken_seal(document: Mapping[str, Any]) -> None:
    """Raise ValueError that names the field that does not match its digest."""
    try:
        found, digests = checksum(document), field_digests(document)
    except (TypeError, ValueError, RecursionError) as error:  # integers above 2^53, lone surrogates
        raise ValueError(f"not an RFC 8785 document: {error}") from error
    if document.get("checksum") == found:
        return
    stated = document.get("field_digests")
    stated = stated if isinstance(stated, dict) else {}
    touched = [name for name in FIELDS if name not in UNSEALED and digests.get(name) != stated.get(name)]
    unknown = [name for name in document if name not in FIELDS]
    if unknown:
        raise ValueError(f"field {unknown[0]!r:.60} is unknown: the checksum does not match")
    where = ", ".join(touched[:3]) or ("checksum" if set(stated) == set(digests) else "field_digests")
    raise ValueError(f"field {where} was changed: the checksum does not match")


def is_checksum(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None
