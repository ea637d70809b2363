"""The values of the pipeline: frozen, slotted, without torch. Every unit is in the name.

    Fingerprint -> Knobs -> Accepted -> Recipe -> Passed -> Race -> Verdict -> Decision

A value that crosses a process or a disk goes through `to_json`/`from_json` and `canonical_json`: data, never pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from autosel import formats
from autosel.formats import PLAIN, CacheFormat, WeightFormat

Scalar = str | int | float | bool
DTypeName = formats.DTypeName
DTYPES, DTYPE_BYTES = formats.DTYPES, formats.DTYPE_BYTES
Backend = Literal[
    "TORCH", "INDUCTOR", "CPP", "TRITON", "CUDA_EXT", "CUTLASS", "FLASHINFER", "FLASH_ATTN", "LIGER", "QUACK", "SGL",
    "USER",
]  # fmt: skip
DeviceKind = Literal["cpu", "cuda"]
ELSEWHERE = "engine:own"  # candidate in counts of calls: an engine ran its own kernel
WHOLE_STEP = "step"  # op of a decision about a whole decode step, which has no contract of its own, only the decoder's


# --- workload --------------------------------------------------------------------------------------------------------

# Dimensions that a caller varies from step to step; every other dimension belongs to the model and is exact in a key.
COUNT_DIMS = frozenset({"M", "B", "S"})
LENGTH_DIMS = frozenset({"L"})
EXACT = 8  # counts up to here have their own buckets


def count_bucket(n: int) -> tuple[int, int]:
    """Return the (lowest, highest) count that shares n's bucket: exact to 8, then (2^k, 2^(k+1)]."""
    if n <= EXACT:
        return n, n
    high = 1 << (n - 1).bit_length()
    return high // 2 + 1, high


def length_bucket(n: int) -> tuple[int, int]:
    """Return the (lowest, highest) context length that shares n's bucket: (2^k, 2^(k+1)]; all up to 16 share one."""
    high = max(16, 1 << (n - 1).bit_length())
    return (1 if high == 16 else high // 2 + 1), high


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An op at one shape, dtype and layout.

    `dims` are sizes in the op's own order (M, K, N; B, Hq, Hkv, S, D, L ...). `traits` are the static attributes that
    make another computation (bias, window, softcap, style, offset ...); a trait at its default is left out, so that one
    computation has one key.
    """

    op: str
    dims: tuple[tuple[str, int], ...]
    dtype: DTypeName
    traits: tuple[tuple[str, Scalar], ...] = ()

    def __getitem__(self, dim: str) -> int:
        for name, size in self.dims:
            if name == dim:
                return size
        raise KeyError(f"{self.op} has no dimension {dim}; it has {', '.join(n for n, _ in self.dims)}")

    def trait(self, name: str, default: Scalar) -> Scalar:
        return dict(self.traits).get(name, default)

    @property
    def weight_format(self) -> WeightFormat:
        """Return the format of its weights: the trait `weight`, else plain. Raises UnknownName."""
        return formats.find_weight_format(str(self.trait("weight", PLAIN)))

    @property
    def cache_format(self) -> CacheFormat:
        """Return the format of its keys and values: the trait `cache`, else plain. Raises UnknownName."""
        return formats.find_cache_format(str(self.trait("cache", PLAIN)))

    def at(self, **sizes: int) -> Workload:
        """Return the same workload with some dimensions changed."""
        unknown = set(sizes) - {name for name, _ in self.dims}
        assert not unknown, f"{self.op} has no dimensions {unknown}"
        return dataclasses.replace(self, dims=tuple((n, sizes.get(n, s)) for n, s in self.dims))

    def _spell(self, dims: str) -> str:
        traits = "".join(f".{name}={value}" for name, value in self.traits)
        return f"{self.op}/{dims}/{self.dtype}{traits}"

    @property
    def key(self) -> str:
        """Return the canonical key: `attn/B1.Hq32.Hkv8.S1.D128.L8192/bf16`."""
        return self._spell(".".join(f"{n}{s}" for n, s in self.dims))

    @staticmethod
    def parse(key: str) -> Workload:
        """Return the workload of a canonical key; traits remain text. Raises ValueError."""
        op, dims, rest = (*key.split("/"), "", "")[:3] if key.count("/") == 2 else ("", "", "")
        dtype, *traits = re.split(r"\.(?=[A-Za-z_]+=)", rest)
        sizes = [re.fullmatch(r"([A-Za-z]+?)([1-9][0-9]{0,15})", part) for part in dims.split(".")]
        if dtype not in DTYPE_BYTES or not all(sizes):
            raise ValueError(f"{key!r:.80} is not a workload's key")
        return Workload(
            op=op,
            dims=tuple((m[1], int(m[2])) for m in sizes if m),
            dtype=dtype,  # type: ignore[arg-type]
            traits=tuple((name, value) for name, _, value in (t.partition("=") for t in traits)),
        )

    @property
    def bucket(self) -> str:
        """Return the key with the caller's dimensions widened to their bucket. No other function assigns buckets."""
        return self._spell(".".join(f"{n}{_bucket_text(n, s)}" for n, s in self.dims))

    @property
    def shape_text(self) -> str:
        """Return the shape for people: `B1 Hq32 Hkv8 S1 D128 L8192`."""
        return " ".join(f"{n}{s}" for n, s in self.dims)


def _bucket_text(dim: str, size: int) -> str:
    if dim in COUNT_DIMS:
        low, high = count_bucket(size)
    elif dim in LENGTH_DIMS:
        low, high = length_bucket(size)
    else:
        return str(size)
    return str(size) if low == high else f"{low}-{high}"


# --- fingerprint -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measured (or datasheet) figure. `spread` is (p90 - p10) / median over its windows; 0 for a datasheet."""

    value: float
    unit: str
    spread: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identity of a device, and separately its measured rates.

    `hw_id` is the digest of `identity`; `env_id` that of `environment` (driver, torch, compiler, kernel pack) with it.
    `rates` are never part of a key. `contended` means that other work disturbed the measurement: the best windows are
    reported, not an average. `source` is "measured" or the file of the values. `threads` is the number that this
    process may use if the CPU has more, else 0; it is not part of a key either.
    """

    kind: DeviceKind
    name: str
    identity: Mapping[str, Any]
    environment: Mapping[str, Any]
    rates: Mapping[str, Rate]
    contended: bool = False
    notes: tuple[str, ...] = ()
    source: str = "measured"
    validity: Mapping[str, float] = field(default_factory=dict)
    threads: int = field(default=0, metadata={"later": True})

    @property
    def cpus(self) -> int:
        """Return the useful number of threads: one per usable core; 0 on a GPU."""
        return self.threads or int(self.identity.get("cpus", 0))

    @property
    def hw_id(self) -> str:
        return digest({"kind": self.kind, **self.identity})

    @property
    def env_id(self) -> str:
        return digest({"hw_id": self.hw_id, **self.environment})


# --- knobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting with its formula and inputs, so that anyone can repeat the computation."""

    name: str
    value: Scalar
    formula: str
    inputs: Mapping[str, Scalar]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One candidate's frozen settings for one workload on one device."""

    settings: tuple[Knob, ...] = ()

    def __getitem__(self, name: str) -> Any:
        for knob in self.settings:
            if knob.name == name:
                return knob.value
        raise KeyError(name)

    @property
    def values(self) -> dict[str, Scalar]:
        return {knob.name: knob.value for knob in self.settings}


# --- candidates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The candidate can run this workload here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The candidate cannot run this workload here. `reason` tells a user why."""

    reason: str


Support = Accepted | Rejected


LATER: Mapping[str, bool] = {"later": True}  # of a field that older values lack: not in JSON at its default


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A form of weights that a candidate makes once for each weight, and reads in addition to the weight itself.

    `weights` are the op's arguments that are prepared. `prepare` makes the bytes, `compare` checks them: entries of the
    native artefact, or functions of a Python candidate's module (`compare` may be empty). `share` is the smallest size
    of a prepared weight, relative to the weight. `worth` is the share above which the weight itself is read.
    """

    name: str
    version: int
    weights: tuple[str, ...]
    prepare: str
    compare: str = ""
    share: float = 1.0
    worth: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Cost of preparing the weights of one call: `bytes` are kept in addition to the `plain_bytes` of the weights."""

    layout: str
    version: int
    bytes: int
    plain_bytes: int
    seconds: float

    @property
    def saved_bytes(self) -> int:
        return self.plain_bytes - self.bytes

    @property
    def told(self) -> str:
        sizes = f"{self.bytes / 1e6:.3g} MB besides {self.plain_bytes / 1e6:.3g}"
        return f"{self.layout}, version {self.version}: {sizes}, made in {self.seconds:.2g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRecipe:
    """Compile `source` (a path below kernels/) with `flags`; call `entry` with the op's arguments, then `knob_args`.

    `operands`, if given, replace the arguments: `x`, `w.codes`, `w.scales`, `w.packed` ...
    """

    source: str
    entry: str
    flags: tuple[str, ...] = ()
    knob_args: tuple[str, ...] = ()
    operands: tuple[str, ...] = field(default=(), metadata=LATER)
    layout: Layout | None = field(default=None, metadata=LATER)
    kind: Literal["native"] = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonRecipe:
    """Import `module:function`; it takes the op's arguments, or `operands`, `out` last (None: allocate and return)."""

    target: str
    path: str = ""  # folder to put first on sys.path, for a user's module outside site-packages
    operands: tuple[str, ...] = field(default=(), metadata=LATER)
    layout: Layout | None = field(default=None, metadata=LATER)
    kind: Literal["python"] = "python"


Recipe = NativeRecipe | PythonRecipe


# --- parity ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Every case is within the op's bound. `worst` is the largest error divided by its bound.

    `pairs` rows of the op's array, of `pairs_of`, have run; the rest can be run with `inputs`, the text that all inputs
    were drawn from.
    """

    cases: int
    worst: float
    worst_case: str
    seconds: float = 0.0
    pairs: int = 0
    pairs_of: int = 0
    inputs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failed check: `check` names it, `case` the inputs; `evidence` has the values."""

    check: str
    case: str
    evidence: Mapping[str, Any]
    reason: str = ""
    seconds: float = 0.0


Parity = Passed | Failed


# --- race ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedSamples:
    """One visit to every arm. `order` is the coin-flipped order of arm indices.

    `samples_ns[arm]` are the samples' times per call in nanoseconds, in the order taken.
    """

    order: tuple[int, ...]
    samples_ns: tuple[tuple[float, ...], ...]


CONTENDED_CORES = 0.1  # kept busy by other processes; an idle machine's own services use a fiftieth
CONTENDED_STEAL = 0.02  # share of CPU time


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Other load on the machine while samples were taken."""

    watched: bool  # the system shows when a thread waits for a core; False: no sample was repeated for it
    again: int = 0  # samples repeated because a thread waited for a core
    busy_cores: float = 0.0  # kept busy by other processes
    stolen: float = 0.0  # share of CPU time that the hypervisor gave to other guests
    by: tuple[str, ...] = ()  # the busiest processes, most first: `cc1plus 0.9 cores`

    @property
    def contended(self) -> bool:
        return self.busy_cores > CONTENDED_CORES or self.stolen > CONTENDED_STEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """Single calls in a situation of a program (`race.deployed`): the time of one call in nanoseconds, by turn and arm
    of the session."""

    situation: str
    turns_ns: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSession:
    """One fresh process. `arms[0]` is the baseline. `voided` says why its pairs do not count, or is empty."""

    kind: Literal["screening", "confirming"]
    seed: int
    arms: tuple[str, ...]
    pairs: tuple[PairedSamples, ...]
    calls_per_sample: tuple[int, ...]
    read_bytes_per_s: float = 0.0  # best read probe interleaved in this session: the physical ceiling
    aa_crossed: bool | None = None  # True if the baseline's clone crossed E >= 1/alpha_s; None: no clone ran
    dropped_pairs: int = 0
    voided: str = ""
    conditions: Conditions | None = field(default=None, metadata=LATER)  # None: not observed
    prepared: Mapping[str, Prepared] | None = field(default=None, metadata=LATER)  # by arm: cost of its layout
    checked: tuple[tuple[int, int], ...] = field(default=(), metadata=LATER)  # (compared in full, timed) calls by arm
    deployed: tuple[Deployed, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reruns:
    """How far apart the effects of repeated tunes were on this kind of device, before a race."""

    degrees: int = 0  # of freedom
    variance: float = 0.0  # of the difference between the logarithms of two effects of the same arms


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """All sessions of one attempt at one workload, with the verdict's parameters."""

    workload: Workload
    baseline: str
    incumbent: str
    finalist: str | None
    delta: float
    alpha_session: float
    pi: float
    sessions: tuple[RaceSession, ...]
    time_class: Literal["short", "long"] = "short"  # the A/A history of its sessions
    nominees: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reruns: Reruns = field(default=Reruns(), metadata=LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A ratio of times, rival / winner: above 1 means that the winner is faster. `lo`..`hi` covers 95 %."""

    median: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A candidate's time per call over the confirming (or screening) samples."""

    median_us: float
    lo_us: float
    hi_us: float
    p95_us: float
    min_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedTiming:
    """The median time of a single call in a situation of a program, of the winner and of the baseline."""

    situation: str
    calls: int
    winner_us: float
    baseline_us: float


Outcome = Literal["promote", "tie", "lose", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result that the samples justify, in words and figures; a pure function of a Race."""

    outcome: Outcome
    winner: str
    reason: str
    effect: Effect | None  # winner over the baseline; None if nothing was timed
    over_incumbent: Effect | None = None
    next_best: tuple[str, float] | None = None  # candidate, its time over the winner's
    timings: Mapping[str, Timing] = field(default_factory=dict)
    e_values: tuple[float, ...] = ()
    wins: tuple[tuple[int, int], ...] = ()  # (pairs won against the baseline, pairs) for each confirming session
    false_promotion_bound: float | None = None
    read_bytes_per_s: float = 0.0
    roofline: float | None = None  # fraction of the limit given by the read rate of this race
    conditions: Conditions | None = field(default=None, metadata=LATER)  # None: not observed
    prepared: Prepared | None = field(default=None, metadata=LATER)  # cost of the winner's layout
    checked: tuple[int, int] | None = field(default=None, metadata=LATER)  # the winner's calls: (compared, timed)
    deployed: tuple[DeployedTiming, ...] = field(default=(), metadata=LATER)


State = Literal["promoted", "kept", "demoted", "quarantined", "pinned"]
SERVING: tuple[State, ...] = ("promoted", "kept", "pinned")  # states in which a decision's arm serves


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A kernel that serves or was raced: enough to load it again, and to detect that it has changed.

    `digest` covers build and knobs (a native arm) or the versions of the libraries that it calls (torch's). `build` is
    the digest of the compiled artefact, which `dispatch` loads; empty for an arm that is not compiled.
    """

    candidate: str
    backend: str
    recipe: Recipe
    knobs: Mapping[str, Scalar]
    digest: str
    build: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A stored verdict. Decisions are appended, never edited."""

    id: int
    state: State
    hw_id: str
    op: str
    bucket: str
    mode: str
    workload: Workload
    arm: Arm
    baseline: Arm
    verdict: Verdict | None
    reason: str
    created_at: str  # UTC, ISO 8601
    length_range: tuple[int, int] | None = None  # max_len that this row serves, if its bucket was split at a crossover
    stale: str = ""  # what has changed since its race: its arm has passed parity again, and another race is due

    @property
    def standing(self) -> Verdict | None:
        """Return the verdict if it is about the arm that serves, else None.

        After a demotion, or if a user promoted another arm, the verdict is history: its effect must not be shown as
        current.
        """
        v = self.verdict
        return v if v is not None and self.state in SERVING and v.winner == self.arm.candidate else None

    @property
    def effect(self) -> Effect | None:
        """Return the effect of what serves over the baseline, if its own race measured it."""
        return self.standing.effect if self.standing is not None else None

    @property
    def next_best(self) -> tuple[str, float] | None:
        """Return the fastest other candidate, and its time over that of what serves.

        If that is the baseline, the ratio is the effect: two candidates have one ratio everywhere.
        """
        found = self.standing.next_best if self.standing is not None else None
        of_baseline = found is not None and found[0] == self.baseline.candidate != self.arm.candidate
        return (found[0], self.effect.median) if found and of_baseline and self.effect else found

    @property
    def told(self) -> str:
        """Return the reason; for a decision that no longer serves with its state: `demoted: NaN seen`."""
        return self.reason if self.state in SERVING else f"{self.state}: {self.reason}"


Origin = Literal["raced", "raced under other conditions", "derived", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCalls:
    """The calls of one workload that one kernel ran in a process, and the origin of their time. `why` is empty if a
    decision serves them."""

    op: str
    bucket: str  # "" if no workload describes the calls
    candidate: str
    why: str
    calls: int
    us_per_call: float | None
    origin: Origin

    @property
    def us(self) -> float:
        return self.calls * (self.us_per_call or 0.0)


# --- data, not pickle ------------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> bytes:
    """Return RFC 8785 bytes: one spelling for each value."""
    import rfc8785

    return rfc8785.dumps(to_json(value))


def digest(value: Any) -> str:
    """Return the sha256 (hex) of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def to_json(value: Any) -> Any:
    """Return a value as plain JSON types; dataclasses become objects by field name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(item) for name, item in _items(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} is not a value")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield fields and their values, without later fields at their default."""
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        if not (f.metadata.get("later") and item == f.default):
            yield f.name, item


def from_json(kind: Any, data: Any) -> Any:
    """Invert `to_json` for type `kind`. Raises ValueError, naming the field, on anything unexpected."""
    return _decode(kind, data, kind.__name__ if isinstance(kind, type) else str(kind))


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, data, where)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{where}: {data!r} is none of {args}")
        return data
    if origin is tuple:
        return _decode_tuple(args, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
        return {k: _decode(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return _float(data, where)
    if kind is type(None) and data is None:
        return None
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {data!r:.80}")
    return data


def _float(data: int, where: str) -> float:
    try:
        return float(data)
    except OverflowError:
        raise ValueError(f"{where}: an integer beyond any float") from None


def _decode_union(args: tuple[Any, ...], data: Any, where: str) -> Any:
    for arm in args:
        try:
            return _decode(arm, data, where)
        except ValueError:
            continue
    raise ValueError(f"{where}: {data!r:.80} is none of {', '.join(getattr(a, '__name__', str(a)) for a in args)}")


def _decode_tuple(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"{where}: expected a list, got {type(data).__name__}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if len(data) != len(args):
        raise ValueError(f"{where}: expected {len(args)} items, got {len(data)}")
    return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:
    """Return the type hints of a dataclass; computing them takes longer than the rest of decoding."""
    return typing.get_type_hints(kind)


@lru_cache(maxsize=256)
def _required(kind: Any) -> tuple[str, ...]:
    absent = dataclasses.MISSING
    return tuple(f.name for f in dataclasses.fields(kind) if f.default is absent and f.default_factory is absent)


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    hints = _hints(kind)
    unknown = set(data) - set(hints)
    if unknown:
        raise ValueError(f"{where}: unknown fields {', '.join(sorted(unknown))[:200]}")
    missing = [name for name in _required(kind) if name not in data]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in data.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def parse_json(text: str | bytes, *, what: str = "document", depth: int = 32) -> Any:
    """Parse strict JSON.

    It refuses NaN, infinity (1e999 too), whole numbers beyond any float, duplicate keys, deep nesting and lone
    surrogates, all of which Python's parser accepts. Raises ValueError that names `what`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"{what}: a key appears twice in one object")
        return found

    def refuse(name: str) -> Any:
        raise ValueError(f"{what}: {name} is not JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refuse(digits[:40])

    def whole(digits: str) -> int:
        if math.isinf(float(digits)):
            raise ValueError(f"{what}: a whole number of {len(digits)} digits is beyond any float")
        return int(digits)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite, parse_int=whole)
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8") from error
    _refuse(data, depth, what)
    return data


def _refuse(data: Any, left: int, what: str) -> None:
    """Refuse deep nesting, and lone surrogates: half a character can be neither stored nor printed."""
    if left < 0:
        raise ValueError(f"{what} is nested too deeply")
    if isinstance(data, str) and not data.isascii() and any("\ud800" <= c <= "\udfff" for c in data):
        raise ValueError(f"{what}: a lone surrogate is not text")
    for item in (*data, *data.values()) if isinstance(data, dict) else data if isinstance(data, list) else ():
        _refuse(item, left - 1, what)
