"""Generate settings of CUTLASS products near a closed form. A build takes half a minute, too long for a full grid.

Compiled settings change one at a time: the tile to each side, the stages, the cluster, the scheduler. The run-time
setting (the split of K) takes every value with each build.
"""

from __future__ import annotations

from collections.abc import Iterator

from autosel.knobs.gpu import cutlass
from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Scalar

Setting = dict[str, Scalar]

SPLITS = (1, 2, 4, 8)
STEP_BYTES = cutlass.STEP_BYTES


def around(closed: Setting, f: GpuFacts) -> list[Setting]:
    """Return the closed form and its neighbours that the device can run."""
    found = _hopper(closed, f) if "tile_m" in closed else _ampere(closed, f)
    return [dict(one) for one in dict.fromkeys(tuple(setting.items()) for setting in (closed, *found))]


def _hopper(closed: Setting, f: GpuFacts) -> Iterator[Setting]:
    for build in _hopper_builds(closed):
        m, n, cluster = int(build["tile_m"]), int(build["tile_n"]), int(build["cluster"])
        fit = (f.smem_per_cta - cutlass.end_bytes(m, n)) // ((m + n) * STEP_BYTES)
        stages = min(int(build["stages"]), fit)
        if stages < 2 or (build["stream_k"] and m < cutlass.WIDE):
            continue
        given = {"stages": stages, "sms": int(build["sms"]) // cluster * cluster}
        # Set split_k only where the build supports it; the stream-K scheduler of a large product splits K
        # automatically.
        splits = SPLITS if build["swap"] and build["stream_k"] else (1,)
        yield from ({**build, **given, "split_k": s} for s in sorted({*splits, *_kept(closed, build)}))


def _kept(closed: Setting, build: Setting) -> tuple[int, ...]:
    """Return the closed form's own split, for builds that support it."""
    return (int(closed["split_k"]),) if build["stream_k"] == closed["stream_k"] else ()


def _hopper_builds(closed: Setting) -> Iterator[Setting]:
    m, n = int(closed["tile_m"]), int(closed["tile_n"])
    yield closed
    for tile_m, tile_n in ((cutlass.NARROW + cutlass.WIDE - m, n), (m, 2 * n), (m, n // 2)):
        if cutlass.COLUMNS_LEAST <= tile_n <= 256:
            yield {**closed, "tile_m": tile_m, "tile_n": tile_n, "stages": 64}  # as many as fit
    for stages in (int(closed["stages"]) // 2, int(closed["stages"]) - 1, int(closed["stages"]) + 2):
        yield {**closed, "stages": stages}
    yield {**closed, "stream_k": 1 - int(closed["stream_k"]), **({"tile_m": cutlass.WIDE} if m < cutlass.WIDE else {})}
    if not closed["swap"]:
        yield {**closed, "cluster": 3 - int(closed["cluster"])}


def _ampere(closed: Setting, f: GpuFacts) -> Iterator[Setting]:
    rows, columns, stages = (int(closed[name]) for name in ("rows", "columns", "stages"))
    builds = [(rows, columns, s) for s in (stages, stages // 2, stages - 1, stages + 2)]
    builds += [(cutlass.NARROW + cutlass.WIDE - rows, columns, stages), (rows, 2 * columns, stages)]
    builds += [(rows, columns // 2, stages)]
    for r, c, s in builds:
        fit = min(s, f.smem_per_cta // ((r + c) * STEP_BYTES))
        if 16 <= c <= cutlass.COLUMNS_MOST and fit >= 2 and cutlass.laid_bytes(r, c) <= f.smem_per_cta:
            for split in sorted({*SPLITS, int(closed["split_k"])}):
                yield {**closed, "rows": r, "columns": c, "stages": fit, "split_k": split}
