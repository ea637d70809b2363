"""Compute knobs of CUTLASS's matrix products: `hopper` for wgmma and TMA (sm_90), `ampere` for mma and cp.async (sm_80,
86, 89, 120).

Both follow gemm.py's routes. Up to M2 rows the weights stream: they lie along the tile's long side, x along its short
one (`columns`), because sixteen rows of x do not fill a tile of 64. Above, the tile is chosen for reuse.

A tile of weights has 64 rows or 128. Each x is read from L2 once per tile: M / rows bytes for a byte of weights, and L2
carries both while 1 + M / rows <= beta2 / beta. So up to 64 (beta2 / beta - 1) rows of x (`narrow_most`) can use 64:
H200 80, RTX 5070 Ti 137. More and narrower tiles are more readers, which small outputs lack.

There is no decode attention on CUTLASS. It would add wgmma and TMA, but decode lacks neither multiply-adds nor bytes in
flight: up to 6 query rows per KV head CUDA cores keep up with an H200's memory, and mma's tiles of 16 rows do beyond
(cuda/attn_decode.cu, cuda/attn_decode_mma.cu). From about 64 packed rows on, as in chunked prefill, it would pay;
docs/gpu.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autosel.knobs.gpu import gemm
from autosel.knobs.gpu.facts import GpuFacts, power_of_two
from autosel.knobs.gpu.gemv import Projection, projection
from autosel.values import Knob, Knobs, Workload

STEP_BYTES = gemm.TILE_ROW_BYTES  # of a row per stage: one row of the 128-byte swizzle
NARROW, WIDE = 64, 128  # weight rows per tile
SPLIT_MOST = 64
FILLED = 0.85  # of the last wave; below this, splitting a tile pays (knobs of `gemm.large`)


# --- Hopper -----------------------------------------------------------------------------------------------------------

EPILOGUE_COLUMNS, EPILOGUE_STAGES = 32, 4  # CUTLASS's epilogue: sub-tiles of 64 or 128 rows by 32 columns, up to four
COLUMNS_LEAST = 16  # with 8, CUTLASS compiles only numbers of stages that are powers of two
BARRIER_BYTES = 1024  # mbarriers of the stages and of the scheduler, rounded up


def hopper(w: Workload, f: GpuFacts) -> Knobs:
    """Return swap, tile_m, tile_n, stages, cluster, stream_k, split_k, sms.

    Up to M2: y^T = w x^T (`swap`), tiles of 64 rows of w up to `narrow_most` if N / 64 tiles are S_min or more, else of
    128, split along K as gemm.stream splits; CUTLASS shares a tile's K only between CTAs of 128 rows. Stages: rho *
    lambda, what an SM can draw, is in flight. H200, M = 16: N = 4096 takes 64 tiles of 64 rows and 8 stages; N = 1024
    takes 8 of 128, 5 stages, split 8.

    Above: gemm.large's tile, cluster and Stream-K; CUTLASS's epilogue needs sub-tiles in addition to the stages. H200:
    128 x 256, 4 stages.
    """
    p = projection(w)
    if p.rows > gemm.large_from(p.dtype, f):
        return _hopper_large(w, p, f)
    columns = columns_of(p, COLUMNS_LEAST, 256)
    fine = p.rows <= narrow_most(f) and gemm.tiles_of(p, NARROW, columns) >= f.sms_needed
    rows = NARROW if fine else WIDE
    s = gemm.streaming(p, f, rows=rows, columns=columns, beside=end_bytes(rows, columns), split_most=SPLIT_MOST)
    return Knobs(
        settings=(
            Knob(
                name="swap",
                value=1,
                formula="M <= M2",
                inputs={"M": p.rows, "M2": gemm.large_from(p.dtype, f)},
                reason="weights fill the tile's 64 rows; x has fewer",
            ),
            *_streaming_knobs(p, s, f, ("tile_m", "tile_n"), "N / 64 tiles are S_min"),
            Knob(name="cluster", value=1, formula="1 while streaming", inputs={}, reason="no operand is shared enough"),
            Knob(
                name="stream_k",
                value=int(s.split > 1),
                formula="split_k > 1",
                inputs={"split_k": s.split},
                reason="the scheduler that shares tiles costs a cleared workspace a call" if s.split > 1 else "",
            ),
            Knob(name="sms", value=f.sms, formula="S", inputs={"S": f.sms}),
        )
    )


def _hopper_large(w: Workload, p: Projection, f: GpuFacts) -> Knobs:
    plan = gemm.large(w, f)
    m, n, cluster = plan["tile_m"], plan["tile_n"], plan["cluster"]
    shared = plan["schedule"] == "stream_k" and m >= WIDE
    stages = (f.smem_per_cta - end_bytes(m, n)) // ((m + n) * STEP_BYTES)
    chosen = {k.name: k for k in plan.settings}
    return Knobs(
        settings=(
            Knob(name="swap", value=0, formula="M <= M2", inputs={"M": p.rows, "M2": gemm.large_from(p.dtype, f)}),
            chosen["tile_m"],
            chosen["tile_n"],
            Knob(
                name="stages",
                value=stages,
                formula="(smem - epilogue) / ((BM + BN) * 128)",
                inputs={"smem": f.smem_per_cta, "epilogue": end_bytes(m, n)},
            ),
            chosen["cluster"],
            Knob(
                name="stream_k",
                value=int(shared),
                formula="gemm.large's schedule, where the tile has 128 rows or more",
                inputs={"schedule": plan["schedule"], "tile_m": m},
            ),
            Knob(name="split_k", value=1, formula="1", inputs={}, reason="Stream-K cuts K itself" if shared else ""),
            Knob(
                name="sms",
                value=plan["sms"] // cluster * cluster,
                formula="gemm.large's, in whole clusters",
                inputs={"sms": plan["sms"], "cluster": cluster},
            ),
        )
    )


def end_bytes(m: int, n: int) -> int:
    """Return the shared memory in addition to the stages: the epilogue's sub-tiles of y or the residual (2 bytes per
    element), one row of bias, and barriers. A tile of at least 128 rows has two warp groups and sub-tiles of 128
    rows."""
    tall, wide = min(m, WIDE), min(n, EPILOGUE_COLUMNS)
    pieces = (m // tall) * math.ceil(n / wide)
    kept = max(min(pieces, EPILOGUE_STAGES), min(pieces, 2) + 1)
    return kept * tall * wide * 2 + 2 * max(m, n) * 2 + BARRIER_BYTES


# --- Ampere and its kin -----------------------------------------------------------------------------------------------

COLUMNS_MOST = 128
PITCH_GAP = 4  # floats between the columns of a tile in its epilogue
SIDES = tuple((rows, columns) for rows in (NARROW, WIDE) for columns in (64, 128))


def ampere(w: Workload, f: GpuFacts) -> Knobs:
    """Return rows, columns, stages, split_k: y^T = w x^T at every M, with a CTA per tile or part of its K.

    Up to M2: as `hopper`, tiles of 64 rows up to `narrow_most` if 128 would leave SMs without one. The CTAs of a tile
    leave their sums in a workspace and the last one adds them in order, without a second kernel and without clearing.
    RTX 5070 Ti, M = 16: N = 4096 takes 64 x 16 and 4 stages, unsplit; N = 1024 splits in 2.

    Above: tiles of 64 or 128 on either side, first those that feed the tensor cores from L2, then the least waves times
    area, the fullest last wave, the least waste. If the last wave stays under 85 % and K > 3N, K is split into up to 8
    parts, as many as make it shortest: ceil(s G / S) / s waves, and 8 s M N bytes through L2. RTX 5070 Ti, M = 4096:
    128 x 128, 3 stages.
    """
    p = projection(w)
    if p.rows > gemm.large_from(p.dtype, f):
        return _ampere_large(p, f)
    columns = columns_of(p, 16, COLUMNS_MOST)
    fine = p.rows <= narrow_most(f) and gemm.tiles_of(p, WIDE, columns) < f.sms
    s = gemm.streaming(p, f, rows=NARROW if fine else WIDE, columns=columns, split_most=SPLIT_MOST)
    return Knobs(settings=_streaming_knobs(p, s, f, ("rows", "columns"), "N / 128 tiles are fewer than S"))


def coverings(p: Projection, f: GpuFacts) -> Iterator[gemm.Tile]:
    """Yield the legal tiles of y^T: m along the rows of x, n along those of w."""
    for rows, columns in SIDES:
        stages = f.smem_per_cta // ((rows + columns) * STEP_BYTES)
        if stages >= 2 and laid_bytes(rows, columns) <= f.smem_per_cta:
            count = gemm.tiles_of(p, rows, columns)
            yield gemm.Tile(m=columns, n=rows, stages=stages, count=count, waves=math.ceil(count / f.sms))


def _ampere_large(p: Projection, f: GpuFacts) -> Knobs:
    needed = f.matrix_flops(p.dtype) * p.weight_bytes / (2 * f.l2)
    t = _covering(p, f, needed)
    full = t.count / (f.sms * t.waves)
    split = _fewest(p, f, t) if full < FILLED and p.depth > 3 * p.outputs else 1
    told = {"M": p.rows, "N": p.outputs, "S": f.sms}
    tile_bytes = (t.m + t.n) * STEP_BYTES
    return Knobs(
        settings=(
            Knob(
                name="rows",
                value=t.n,
                formula="of tiles with R*C/(R+C) >= need: least waves * R * C, fullest last wave, least waste",
                inputs={**told, "need": needed},
            ),
            Knob(name="columns", value=t.m, formula="as rows", inputs={"intensity": t.intensity}),
            Knob(
                name="stages",
                value=min(t.stages, max(3, 1 + math.ceil(f.rho * f.latency_s / tile_bytes))),
                formula="min(smem / stage bytes, max(3, 1 + ceil(rho * lambda / stage bytes)))",
                inputs={"smem": f.smem_per_cta, "rho": f.rho, "lambda": f.latency_s},
            ),
            Knob(
                name="split_k",
                value=split,
                formula="if G / (S * waves) < 0.85 and K > 3 N: s <= 8 of least ceil(s G / S) t / s + 8 s M N / beta2",
                inputs={"full": full, "K": p.depth, "N": p.outputs, "G": t.count, "S": f.sms},
            ),
        )
    )


def _covering(p: Projection, f: GpuFacts, needed: float) -> gemm.Tile:
    legal = list(coverings(p, f))
    fed = [t for t in legal if t.intensity >= needed and t.count >= f.sms]

    def rank(t: gemm.Tile) -> tuple[int, int, int, int]:
        area = t.m * t.n
        return t.waves * area, -((t.count - 1) % f.sms + 1), t.count * area, -area

    return min(fed or legal, key=rank)


def _fewest(p: Projection, f: GpuFacts, t: gemm.Tile) -> int:
    tile_s = 2 * t.m * t.n * p.depth * f.sms / f.matrix_flops(p.dtype)

    def seconds(split: int) -> float:
        joined = 8 * split * p.rows * p.outputs / f.l2 if split > 1 else 0.0
        return math.ceil(split * t.count / f.sms) / split * tile_s + joined

    most = max(1, min(8, p.depth * p.weight_bytes // (4 * STEP_BYTES)))
    return min(range(1, most + 1), key=seconds)


def laid_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a tile of fp32 sums on its way to y, in the memory of the finished stages."""
    return 4 * (rows + PITCH_GAP) * columns + 16


# --- both -------------------------------------------------------------------------------------------------------------


def narrow_most(f: GpuFacts) -> int:
    """Return the maximum rows of x for tiles of 64 weight rows: 64 (beta2 / beta - 1)."""
    return math.floor(NARROW * (f.l2 / f.read - 1))


def columns_of(p: Projection, least: int, most: int) -> int:
    """Return the columns of a streaming tile: M as a power of two, so that a bucket of M shares one build."""
    return max(least, min(most, power_of_two(p.rows)))


def _streaming_knobs(
    p: Projection, s: gemm.Streaming, f: GpuFacts, sides: tuple[str, str], when: str
) -> tuple[Knob, ...]:
    return (
        Knob(
            name=sides[0],
            value=s.rows,
            formula=f"64 if M <= 64 (beta2 / beta - 1) and {when}, else 128",
            inputs={"M": p.rows, "N": p.outputs, "S": f.sms, "S_min": f.sms_needed, "beta": f.read, "beta2": f.l2},
        ),
        Knob(name=sides[1], value=s.columns, formula="M as a power of two, within the tile's", inputs={"M": p.rows}),
        *gemm.streaming_knobs(p, s, f, "added in fp32 in a fixed order"),
    )
