"""Compute knobs of matrix products on tensor cores: up to M2 rows weights stream past them (`stream`), above a tile is
reused (`large`).

The route of `linear` by M: CUDA cores below M*, streaming tensor cores to M2, large tiles beyond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autosel.knobs.gpu import gemv
from autosel.knobs.gpu.facts import GpuFacts
from autosel.knobs.gpu.gemv import Projection, projection
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

STREAM_ROWS = 128  # BN: weight rows per CTA, the matrix instruction's long side
TILE_ROW_BYTES = 128  # BK in bytes: one 128-byte swizzle row
SIDES = (64, 128, 256)
ACCUMULATORS_MOST = 128 * 256  # half of an SM's registers
STAGES_LEAST = 3  # one consumed, two in flight


# --- which route ------------------------------------------------------------------------------------------------------


def route(w: Workload, f: GpuFacts) -> Knobs:
    """Return route (`gemv`, `stream`, `large`), with the two crossovers that decide it."""
    p = projection(w)
    first, second = crossover(p, f), large_from(p.dtype, f)
    return Knobs(
        settings=(
            Knob(
                name="route",
                value="gemv" if p.rows < first else "stream" if p.rows <= second else "large",
                formula="gemv below m_star, stream up to m_large, else large",
                inputs={"M": p.rows, "m_star": first, "m_large": second},
            ),
            Knob(
                name="m_star",
                value=first,
                formula="first M with t_gemv(M) > t_stream(M)",
                inputs={"N": p.outputs, "K": p.depth, **f.inputs()},
            ),
            Knob(
                name="m_large",
                value=second,
                formula="b * pi / (2 * beta), within 64 .. 256",
                inputs={"b": p.weight_bytes, "pi": f.matrix_flops(p.dtype), "beta": f.read},
                reason="where the product stops being bound by reading its weights",
            ),
        )
    )


def crossover(p: Projection, f: GpuFacts) -> int:
    """Return M*: the first M at which CUDA cores are no longer fastest; they hold accumulators for eight rows."""
    for rows in range(1, gemv.M_MOST + 1):
        at = Projection(rows=rows, outputs=p.outputs, depth=p.depth, dtype=p.dtype)
        if gemv.time_s(at, f) > stream_time_s(at, f):
            return rows
    return gemv.M_MOST + 1


def large_from(dtype: str, f: GpuFacts) -> int:
    """Return M2 = clamp(b pi / 2 beta, 64, 256): H200 181, RTX 5070 Ti 120 (bf16)."""
    return min(256, max(64, math.floor(DTYPE_BYTES[dtype] * f.matrix_flops(dtype) / (2 * f.read))))


# --- weights stream past the tensor cores -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Hold a tile of weights that streams past x, and the number of CTAs that share its K."""

    rows: int  # of w
    columns: int  # of x, padded
    stages: int
    tiles: int  # G: without the split
    split: int

    @property
    def in_flight(self) -> int:
        """Return X_cta: bytes of weights that one CTA has in flight."""
        return (self.stages - 1) * self.rows * TILE_ROW_BYTES


def stream(w: Workload, f: GpuFacts) -> Knobs:
    """Return tile_rows, tile_depth, columns, stages, split_k.

    Stages: a CTA has (stages - 1) weight tiles in flight, which lets it draw all that its SM can (rho lambda), as far
    as shared memory allows. Split: s = ceil(max(S_min / G, X / (G X_cta))), at most K / (4 BK): as many CTAs as DRAM
    needs readers and bytes in flight. H200: N=4096 -> 2, N=1024 -> 8; RTX 5070 Ti: 1 and 3.
    """
    p = projection(w)
    s = stream_shape(p, f)
    depth = TILE_ROW_BYTES // p.weight_bytes
    return Knobs(
        settings=(
            Knob(name="tile_rows", value=STREAM_ROWS, formula="BN = 128", inputs={}),
            Knob(name="tile_depth", value=depth, formula="BK = 128 bytes of weights", inputs={"b": p.weight_bytes}),
            Knob(name="columns", value=s.columns, formula="M rounded up to 8", inputs={"M": p.rows}),
            *streaming_knobs(p, s, f, "reduced in fp32 in a fixed order: bf16 atomics double the error"),
        )
    )


def stream_shape(p: Projection, f: GpuFacts) -> Streaming:
    return streaming(p, f, rows=STREAM_ROWS, columns=min(256, 8 * math.ceil(p.rows / 8)))


def tiles_of(p: Projection, rows: int, columns: int) -> int:
    """Return G: tiles of the product."""
    return math.ceil(p.outputs / rows) * math.ceil(p.rows / columns)


def streaming(
    p: Projection, f: GpuFacts, *, rows: int, columns: int, beside: int = 0, split_most: float = math.inf
) -> Streaming:
    """Return stages and split of a streaming tile; `beside`: bytes of shared memory in addition to the stages."""
    weights = rows * TILE_ROW_BYTES
    fit = (f.smem_per_cta - beside) // (weights + columns * TILE_ROW_BYTES)
    stages = max(2, min(fit, 1 + math.ceil(f.rho * f.latency_s / weights)))
    tiles = tiles_of(p, rows, columns)
    wanted = math.ceil(max(f.sms_needed / tiles, f.in_flight / (tiles * (stages - 1) * weights)))
    split = min(wanted, split_most, p.depth * p.weight_bytes // (4 * TILE_ROW_BYTES))
    return Streaming(rows=rows, columns=columns, stages=stages, tiles=tiles, split=max(1, int(split)))


def streaming_knobs(p: Projection, s: Streaming, f: GpuFacts, reduced: str) -> tuple[Knob, Knob]:
    """Return stages and split_k; `reduced`: how the sums of a split are added."""
    return (
        Knob(
            name="stages",
            value=s.stages,
            formula="min(smem / stage bytes, 1 + ceil(rho * lambda / weight tile bytes))",
            inputs={"smem": f.smem_per_cta, "rho": f.rho, "lambda": f.latency_s},
        ),
        Knob(
            name="split_k",
            value=s.split,
            formula="ceil(max(S_min / G, X / (G * X_cta))), at most K / (4 * BK)",
            inputs={"S_min": f.sms_needed, "G": s.tiles, "X": f.in_flight, "X_cta": s.in_flight, "K": p.depth},
            reason=reduced if s.split > 1 else "",
        ),
    )


def stream_time_s(p: Projection, f: GpuFacts) -> float:
    """Predict a + max(bNK / beta_eff, 2MNK / pi) + [s > 1] 8sMN / beta2: partial sums are written and read once in
    fp32."""
    s = stream_shape(p, f)
    readers = s.tiles * s.split
    rate = min(f.read, readers * f.rho, readers * s.in_flight / f.latency_s)
    work = 2 * p.rows * p.outputs * p.depth / f.matrix_flops(p.dtype)
    reduce = 8 * s.split * p.rows * p.outputs / f.l2 if s.split > 1 else 0.0
    return f.overhead_s + max(p.bytes_read / rate, work) + reduce


# --- large tiles ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Hold one legal tile of a large kernel, and how it covers the product."""

    m: int
    n: int
    stages: int
    count: int  # tiles
    waves: int

    @property
    def intensity(self) -> float:
        """Return multiply-adds per operand element read from L2: BM BN / (BM + BN)."""
        return self.m * self.n / (self.m + self.n)


def large(w: Workload, f: GpuFacts) -> Knobs:
    """Return tile_m, tile_n, stages, sms, cluster, schedule.

    Legal tiles fit registers and, with three stages, shared memory. Among the tiles whose intensity BM BN / (BM + BN)
    feeds the tensor cores from L2 (>= pi / beta2, for b = 2), choose the fewest waves, then the fullest last wave, then
    the least waste (DeepGEMM's order). If the largest is too thin, a cluster of two shares one operand. Then as few SMs
    as these waves need; Stream-K if the last wave leaves more than 15 % idle and K > 3N. H200: 128 x 256 with 4 stages;
    RTX 5070 Ti: 128 x 64 with 3.
    """
    p = projection(w)
    needed = f.matrix_flops(p.dtype) * p.weight_bytes / (2 * f.l2)
    tile = best_tile(p, f, needed)
    cluster = 2 if f.cc >= (9, 0) and f.cc[0] != 12 and tile.intensity < needed else 1
    full = tile.count / (f.sms * tile.waves)
    stream_k = full < 0.85 and p.depth > 3 * p.outputs
    told = {"M": p.rows, "N": p.outputs, "S": f.sms}
    return Knobs(
        settings=(
            Knob(
                name="tile_m",
                value=tile.m,
                formula="of tiles with BM*BN/(BM+BN) >= need: fewest waves, fullest last wave, least waste",
                inputs={**told, "need": needed},
            ),
            Knob(name="tile_n", value=tile.n, formula="as tile_m", inputs={"intensity": tile.intensity}),
            Knob(
                name="stages",
                value=tile.stages,
                formula="(smem - epilogue) / ((BM + BN) * 128)",
                inputs={"smem": f.smem_per_cta, "epilogue": epilogue_bytes(tile.m, tile.n, p, f)},
            ),
            Knob(
                name="sms",
                value=f.sms if stream_k else math.ceil(tile.count / tile.waves),
                formula="ceil(tiles / waves); all with Stream-K",
                inputs={"tiles": tile.count, "waves": tile.waves},
            ),
            Knob(
                name="cluster",
                value=cluster,
                formula="2 if the best tile's intensity is below need, where clusters exist",
                inputs={"intensity": tile.intensity, "need": needed},
            ),
            Knob(
                name="schedule",
                value="stream_k" if stream_k else "tiles",
                formula="stream_k if tiles / (S * waves) < 0.85 and K > 3 N",
                inputs={"full": full, "K": p.depth, "N": p.outputs},
            ),
        )
    )


def best_tile(p: Projection, f: GpuFacts, needed: float) -> Tile:
    """Choose the best tile. For few tiles, idle SMs matter more than L2: the intensity counts once the product fills
    the chip."""
    legal = list(tiles(p, f))
    fed = [t for t in legal if t.intensity >= needed and t.count >= f.sms]
    if not fed and max(t.intensity for t in legal) < needed:
        most = max(t.intensity for t in legal)
        fed = [t for t in legal if t.intensity == most and t.count >= f.sms]

    def rank(t: Tile) -> tuple[float, float, float, int]:
        area = t.m * t.n
        return t.waves, -((t.count - 1) % f.sms + 1), t.count * area - p.rows * p.outputs, -t.m

    return min(fed or legal, key=rank)


def tiles(p: Projection, f: GpuFacts) -> Iterator[Tile]:
    for m in SIDES:
        for n in SIDES:
            free = f.smem_per_cta - epilogue_bytes(m, n, p, f)
            stages = free // ((m + n) * TILE_ROW_BYTES)
            if m * n <= ACCUMULATORS_MOST and (stages >= STAGES_LEAST or m == n == SIDES[0]):
                count = tiles_of(p, n, m)
                yield Tile(m=m, n=n, stages=max(2, stages), count=count, waves=math.ceil(count / f.sms))


def epilogue_bytes(m: int, n: int, p: Projection, f: GpuFacts) -> int:
    """Return the epilogue's bytes. Hopper's and B200's kernels store through finished stages of the main loop; others
    need a separate tile, because the next tile's loads already run."""
    return 0 if f.cc[0] in (9, 10) else m * n * max(2, p.weight_bytes)
