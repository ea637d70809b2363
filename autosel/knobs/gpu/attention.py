"""Compute knobs of decode attention: split the KV cache just enough that few sequences fill the chip.

Grouped heads are always packed: a CTA serves all g = Hq / Hkv query heads (times S query rows) of one KV head, so the
cache is read once and n0 = B * Hkv CTAs exist before splitting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autosel.formats import PART_BYTES
from autosel.knobs.gpu.facts import WARP, GpuFacts, power_of_two
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

WARPS = 4
REGISTERS = 128  # per thread: a KV fragment, g accumulators and the running maximum and sum
TILE_LEAST = 32  # tokens: one per lane when scores are reduced
CHUNK_LEAST = 128  # tokens per split: with fewer, fixed costs exceed reading
CTA_S = 1e-6  # o: prologue and epilogue of a CTA. Estimate, to be measured with the kernel
COMBINE_S = 1e-6  # m0: the pass that adds the splits. Estimate, to be measured with the kernel
CUDA_CORE_LANES = 64  # of an SM's 128 lanes: half for scores and values, half for the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Hold the sizes of the cache that decode attention reads."""

    heads: int  # n0 = B * Hkv
    query_heads: int  # B * Hq * S
    group: int  # query rows that share a KV head: g * S
    head_dim: int
    length: int  # keys: max_len, or the window if that is shorter
    dtype_bytes: int
    page: int  # tokens; 0: contiguous
    ragged: bool

    @property
    def token_bytes(self) -> int:
        """Return the bytes of keys and values of one token and KV head."""
        return 2 * self.head_dim * self.dtype_bytes

    @property
    def bytes_read(self) -> int:
        return self.heads * self.length * self.token_bytes


def cache_of(w: Workload) -> CacheSizes:
    window = int(w.trait("window", 0))
    page = dict(w.dims).get("page", 0)
    return CacheSizes(
        heads=w["B"] * w["Hkv"],
        query_heads=w["B"] * w["Hq"] * w["S"],
        group=w["Hq"] // w["Hkv"] * w["S"],
        head_dim=w["D"],
        length=min(w["L"], window + w["S"] - 1) if window else w["L"],
        dtype_bytes=cache_bytes(w),
        page=page,
        ragged=bool(w.trait("ragged", default=False)),
    )


def cache_bytes(w: Workload) -> int:
    """Return the bytes of an element of the cache."""
    return PART_BYTES[w.cache_format.dtype or w.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """Hold the kernel's shape on one device."""

    tile: int  # T, tokens
    stages: int
    ctas_per_sm: int  # c

    def in_flight(self, c: CacheSizes) -> int:
        """Return X_cta: bytes that one CTA has in flight."""
        return self.tile * c.token_bytes * (self.stages - 1)


def decode(w: Workload, f: GpuFacts) -> Knobs:
    """Return tile, stages, warps, ctas_per_sm, split, chunk, matrix, schedule."""
    c = cache_of(w)
    k = shape(c, f)
    s = 1 if c.ragged else split(c, k, f)
    chunk = chunk_tokens(c, k, f, s)
    told = {"X": f.in_flight, "S": f.sms, "token_bytes": c.token_bytes}
    told_split = {"n0": c.heads, "L": c.length, "T": k.tile, "c": k.ctas_per_sm, **f.inputs()}
    lanes = lanes_needed(c, f)
    return Knobs(
        settings=(
            Knob(
                name="tile",
                value=k.tile,
                formula="power of two >= X / S / token_bytes, at least 32; halved until two stages fit",
                inputs={**told, "smem": f.smem_per_cta},
                reason="one tile in flight an SM is what its share of the read rate needs",
            ),
            Knob(
                name="stages",
                value=k.stages,
                formula="1 + ceil(X / (S / 2 * T * token_bytes)), at least 2",
                inputs={**told, "T": k.tile},
                reason="half of the SMs keep DRAM busy, so that the split may stay small",
            ),
            Knob(name="warps", value=WARPS, formula="4", inputs={}),
            Knob(
                name="ctas_per_sm",
                value=k.ctas_per_sm,
                formula="occupancy(128 threads, 128 registers, stages * T * token_bytes)",
                inputs={"smem": k.stages * k.tile * c.token_bytes, "smem_per_sm": f.smem_per_sm},
            ),
            Knob(
                name="split",
                value=s,
                formula="1 if n0 >= 1.25 S_min, else the smallest s within 3 % of the least T(s)",
                inputs={**told_split, "S_min": f.sms_needed},
                reason="equal work instead: lengths differ"
                if c.ragged
                else f"T({s}) = {time_s(c, k, f, s) * 1e6:.1f} us",
            ),
            Knob(
                name="chunk",
                value=chunk,
                formula="L / s in whole tiles; ragged: ceil(sum of lengths * Hkv / (c * S)), longest first",
                inputs={"L": c.length, "s": s, "n0": c.heads, "page": c.page},
            ),
            Knob(
                name="matrix",
                value=lanes > CUDA_CORE_LANES,
                formula="g * beta / (b * S * f) > 64",
                inputs={"g": c.group, "beta": f.read, "b": c.dtype_bytes, "S": f.sms, "f": f.clock_hz},
                reason="tensor cores, padded to 16 rows" if lanes > CUDA_CORE_LANES else "CUDA cores keep up",
            ),
            Knob(
                name="schedule",
                value="equal_work" if c.ragged else "grid",
                formula="equal_work if lengths differ",
                inputs={"ragged": c.ragged},
            ),
        )
    )


def shape(c: CacheSizes, f: GpuFacts) -> KernelShape:
    """Return T, stages, c. H200, bf16, D=128: 64 tokens (32 KiB), 3 stages; RTX 5070 Ti: 32 tokens (16 KiB), 2
    stages."""
    tile = max(TILE_LEAST, power_of_two(f.in_flight / f.sms / c.token_bytes))
    while tile > 1 and 2 * tile * c.token_bytes > f.smem_per_cta:
        tile //= 2
    tile_bytes = tile * c.token_bytes
    stages = max(2, 1 + math.ceil(f.in_flight / (f.sms / 2 * tile_bytes)))
    stages = max(2, min(stages, f.smem_per_cta // tile_bytes))
    ctas = f.occupancy(threads=WARPS * WARP, regs=REGISTERS, smem=stages * tile_bytes)
    return KernelShape(tile=tile, stages=stages, ctas_per_sm=max(1, ctas))


def split(c: CacheSizes, k: KernelShape, f: GpuFacts) -> int:
    """Return 1 if there are enough sequences for every SM that DRAM needs; else the smallest within 3 % of the best
    among the splits that save a tile."""
    if c.heads >= 1.25 * f.sms_needed:
        return 1
    timed = {s: time_s(c, k, f, s) for s in useful_splits(c, k, f)}
    least = min(timed.values())
    return min(s for s, t in timed.items() if t <= 1.03 * least)


def useful_splits(c: CacheSizes, k: KernelShape, f: GpuFacts) -> Iterator[int]:
    """Return 1, and each s up to min(c S / n0, L / chunk_min) that lowers the tiles read by a split."""
    most = min(k.ctas_per_sm * f.sms // c.heads, c.length // max(CHUNK_LEAST, c.page))
    tiles = math.inf
    for s in range(1, max(1, most) + 1):
        if math.ceil(c.length / (s * k.tile)) < tiles:
            tiles = math.ceil(c.length / (s * k.tile))
            yield s


def time_s(c: CacheSizes, k: KernelShape, f: GpuFacts, s: int) -> float:
    """Predict T(s) = waves (o + lambda + tiles * tile bytes / r) + [s > 1] (m0 + 8 B Hq s (D + 2) / beta2).

    r is the rate of one CTA: its share of the read rate, at most what its SM can draw and what it has in flight; waves
    = ceil(n0 s / (c S)); partial outputs are D values, a maximum and a sum in fp32, written and read.
    """
    slots = k.ctas_per_sm * f.sms
    resident = min(c.heads * s, slots)
    rate = min(f.read / resident, f.rho, k.in_flight(c) / f.latency_s)
    tiles = math.ceil(c.length / (s * k.tile))
    wave = CTA_S + f.latency_s + tiles * k.tile * c.token_bytes / rate
    combine = COMBINE_S + 8 * c.query_heads * s * (c.head_dim + 2) / f.l2 if s > 1 else 0.0
    return math.ceil(c.heads * s / slots) * wave + combine


def chunk_tokens(c: CacheSizes, k: KernelShape, f: GpuFacts, s: int) -> int:
    unit = max(k.tile, c.page)
    tokens = math.ceil(c.length * c.heads / (k.ctas_per_sm * f.sms)) if c.ragged else math.ceil(c.length / s)
    return unit * math.ceil(max(tokens, min(c.length, CHUNK_LEAST)) / unit)


def lanes_needed(c: CacheSizes, f: GpuFacts) -> float:
    """Return multiply-adds per clock and SM at the full read rate: g * w. CUDA cores suffice up to 64: g <= 6 on an
    H200."""
    return c.group * f.weights_per_clock(c.dtype_bytes)


def prefill(w: Workload, f: GpuFacts) -> Knobs:
    """Return tile_q, tile_k, stages: a query tile of 128 rows, and the longest key tile of which shared memory holds
    two.

    If heads are so wide that it does not hold two of 16 keys: fewer rows, then one stage.
    """
    b, d = DTYPE_BYTES[w.dtype], w["D"]

    def fits(queries: int, keys: int, stages: int) -> bool:
        return (queries + 2 * stages * keys) * d * b <= f.smem_per_cta

    rows = next((q for q in (128, 64, 32, 16) if fits(q, 16, 2)), 16)
    stages = 2 if fits(rows, 16, 2) else 1
    longest = max((t for t in (32, 64, 128) if fits(rows, t, stages)), default=16)
    return Knobs(
        settings=(
            Knob(
                name="tile_q",
                value=rows,
                formula="two warpgroups of 64 rows; halved, to 16, until two stages of 16 keys fit",
                inputs={"D": d, "b": b, "smem": f.smem_per_cta},
            ),
            Knob(
                name="tile_k",
                value=longest,
                formula="longest with tile_q * D * b + stages * 2 * tile_k * D * b <= smem, at most 128",
                inputs={"D": d, "b": b, "smem": f.smem_per_cta},
                reason="exponentials, not reading, bound it: longer key tiles only cost registers",
            ),
            Knob(name="stages", value=stages, formula="2, or 1 if two do not fit", inputs={"smem": f.smem_per_cta}),
        )
    )
