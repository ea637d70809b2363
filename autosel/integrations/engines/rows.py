"""Describe the rows of an engine's file, each with its source.

measured   a decision raced exactly this: the library call or backend that the row makes the engine run
carried    a decision chose autosel's kernel with these tiles; the engine's own kernel was not timed with them
derived    the closed forms gave it for the device; nothing was timed
default    undecided: the engine's default, written out because engines that select the nearest row would otherwise
           use a neighbour's
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autosel import ops
from autosel.candidates.triton.linear import tiled
from autosel.errors import UsageError
from autosel.integrations.engines.experts import Experts
from autosel.knobs.gpu.facts import GpuFacts, facts, power_of_two
from autosel.knobs.gpu.gemm import TILE_ROW_BYTES
from autosel.models.shape import ModelShape
from autosel.values import DTYPE_BYTES, SERVING, Decision, DTypeName, Fingerprint, Scalar, Workload

Source = Literal["measured", "carried", "derived", "default"]
SOURCES: tuple[Source, ...] = ("measured", "carried", "derived", "default")
WORDS: Mapping[Source, str] = {
    "measured": "measured",
    "carried": "carried over from a measured kernel, not timed in the engine",
    "derived": "derived by formula, not measured",
    "default": "the engine's own default",
}
# Rows of x: every decode batch with a separate bucket, then the tops of the buckets up to a large prefill chunk.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """Hold a row. `value` is the content of the file under `key`; `ask` makes the engine's own lookup find it again."""

    file: str
    key: str
    label: str
    value: Any
    source: Source
    reason: str
    decision: int | None = None
    ask: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Describe a device, its decisions, and a model to serve there, on `tp` devices together.

    `model` is None for a model with experts, for which autosel has no op. `derives`: the closed forms may answer.
    """

    fp: Fingerprint
    decisions: tuple[Decision, ...]
    dtype: DTypeName
    derives: bool
    model: ModelShape | None = None
    experts: Experts | None = None
    tp: int = 1

    @property
    def name(self) -> str:
        known = self.model or self.experts
        return known.name if known else ""

    @property
    def told(self) -> dict[str, str]:
        """Return the model and the dtype for a manifest."""
        return {"model": self.name, "dtype": self.dtype}

    @property
    def facts(self) -> GpuFacts:
        return facts(self.fp)

    def decided(self, w: Workload) -> Decision | None:
        """Return the decision for w's bucket. A decision that also adds a bias or a residual is for the same product,
        and is the second choice."""
        bare = w.bucket
        found = [d for d in self.serving(w.op) if _bare(d.workload) == bare]
        return min(found, key=lambda d: (len(d.workload.traits), -d.id), default=None)

    def serving(self, op: str) -> list[Decision]:
        return [d for d in self.decisions if d.op == op and d.state in SERVING]


def _bare(w: Workload) -> str:
    return Workload(op=w.op, dims=w.dims, dtype=w.dtype).bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Describe one projection as engines run it: q, k and v joined, gate and up joined."""

    label: str
    n: int
    k: int


def products(m: ModelShape, tp: int = 1) -> tuple[Product, ...]:
    """Return the part of each of `tp` devices: rows of qkv and gate_up, columns of o and down. KV heads are never
    divided."""
    if m.Hq % tp or m.I % tp:
        raise UsageError(f"--tp {tp} does not divide {m.name}", why=f"it has {m.Hq} heads, and is {m.I} wide inside")
    heads = m.Hq // tp
    return (
        Product(label="qkv", n=(heads + 2 * max(1, m.Hkv // tp)) * m.D, k=m.d),
        Product(label="o", n=m.d, k=heads * m.D),
        Product(label="gate_up", n=2 * m.I // tp, k=m.d),
        Product(label="down", n=m.d, k=m.I // tp),
    )


def linear(m: int, n: int, k: int, dtype: DTypeName) -> Workload:
    return ops.find("linear").workload(dtype, {"M": m, "N": n, "K": k})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTile:
    """Describe a launch of a Triton matrix product: `m` rows of x, `n` rows of w, depth `k`."""

    m: int
    n: int
    k: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """Hold the result for one product: the winning backend, and its tile if it has one."""

    source: Source
    reason: str
    decision: int | None = None
    backend: str = ""
    tile: EngineTile | None = None


def answer(target: Target, w: Workload) -> EngineAnswer:
    decision = target.decided(w)
    if decision is not None:
        arm = decision.arm
        found = tile(arm.knobs, w, target.facts) if arm.backend == "TRITON" else None
        said = f"decision {decision.id}: {arm.candidate}"
        source: Source = "carried" if found else "measured"
        return EngineAnswer(source=source, reason=said, decision=decision.id, backend=arm.backend, tile=found)
    if target.derives:
        knobs = tiled(w, target.facts)
        return EngineAnswer(
            source="derived", reason="knobs of gemm.stream or gemm.large", tile=tile(knobs.values, w, target.facts)
        )
    return EngineAnswer(source="default", reason="nobody decided it")


EIGHT_WARPS_FROM = 128 * 64  # accumulators, as kernels/triton/gemm.py has it
LEAST_ROWS = 16  # dimensions of the matrix instruction


def tile(knobs: Mapping[str, Scalar], w: Workload, f: GpuFacts) -> EngineTile | None:
    """Return the tile of the streaming or the large-tile knobs; None for knobs of another kernel.

    A stage holds (m + n) * k weights, k = 128 bytes of them; there are fewer stages if those of the knobs do not fit.
    """
    if {"tile_rows", "columns", "stages"} <= set(knobs):
        m, n = max(LEAST_ROWS, power_of_two(int(knobs["columns"]))), int(knobs["tile_rows"])
    elif {"tile_m", "tile_n", "stages"} <= set(knobs):
        m, n = int(knobs["tile_m"]), int(knobs["tile_n"])
    else:
        return None
    stages = max(1, min(int(knobs["stages"]), f.smem_per_cta // ((m + n) * TILE_ROW_BYTES)))
    warps = 8 if m * n >= EIGHT_WARPS_FROM else 4
    return EngineTile(m=m, n=n, k=TILE_ROW_BYTES // DTYPE_BYTES[w.dtype], stages=stages, warps=warps)


def counted(rows: Sequence[EngineRow]) -> dict[Source, int]:
    """Count rows by source, in the order of `SOURCES`, without sources that have none."""
    counts = Counter(row.source for row in rows)
    return {source: counts[source] for source in SOURCES if counts[source]}
