"""Statistics of step times: median, quantiles, and intervals that allow for correlated neighbouring samples.

Every figure is a closed function of the samples, without interpolation tables or a library's generator: a reader who
recomputes it from a certificate gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # the command line reads these modules for every --help
    import numpy as np
    from numpy.typing import NDArray

Samples: TypeAlias = "NDArray[np.float64]"
COVERAGE = 0.95
RESAMPLES = 2000
FEWEST_TO_RESAMPLE = 8  # below it an interval is the whole range of the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Interval `lo`..`hi` that covers the true value in 95 % of runs like this one."""

    lo: float
    hi: float


def median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values, the mean of the two middle ones."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed (nearest rank), always a measured
    one.
    """
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def median_interval(values: Sequence[float]) -> Interval:
    """Return the interval of the median of steps."""
    if len(values) < FEWEST_TO_RESAMPLE:
        return Interval(lo=float(min(values)), hi=float(max(values)))
    return middle(resampled_medians(values)[0])


def speedup_interval(baseline: Sequence[float], optimised: Sequence[float], kept: Sequence[float] = ()) -> Interval:
    """Return the interval of baseline median / optimised median, times the mean of `kept`.

    Samples are drawn in pairs, so a disturbance that slowed both arms cancels. `kept` counts the tokens that each
    optimised step gave for the baseline's one; empty means one.
    """
    if len(baseline) < FEWEST_TO_RESAMPLE:
        few, many = (min(kept), max(kept)) if kept else (1, 1)
        return Interval(lo=min(baseline) / max(optimised) * few, hi=max(baseline) / min(optimised) * many)
    return middle(resampled_speedups(baseline, optimised, kept))


def ratio_interval(now: Sequence[float], before: Sequence[float]) -> Interval | None:
    """Return the interval of the ratio of two separate runs' medians; None if one has fewer than eight samples."""
    if min(len(now), len(before)) < FEWEST_TO_RESAMPLE:
        return None
    above, below = resampled_medians(now)[0], resampled_medians(before)[0]
    return middle(above / below[::-1])  # reversed, so that equal picks of the two runs are independent


def resampled_speedups(baseline: Sequence[float], optimised: Sequence[float], kept: Sequence[float] = ()) -> Samples:
    slow, fast = resampled_medians(baseline, optimised)
    return slow / fast * (resampled("mean", kept)[0] if kept else 1.0)


def resampled_medians(*arms: Sequence[float]) -> list[Samples]:
    return resampled("median", *arms)


def resampled(statistic: Literal["mean", "median"], *arms: Sequence[float]) -> list[Samples]:
    """Return the statistic of each arm in each of 2000 resamples of their common indices.

    A resample consists of circular blocks of ceil(n^(1/3)) neighbours (Politis and Romano 1992), because a disturbance
    lasts longer than a step. The blocks are drawn from Python's own generator, whose `random()` never changes.
    """
    import numpy as np

    samples = [np.asarray(arm, dtype=np.float64) for arm in arms]
    count = len(samples[0])
    starts, block = _block_starts(count)
    rows = max(1, (1 << 21) // count)  # at a time, so that 20 000 steps do not need a gigabyte
    found: list[list[Samples]] = [[] for _ in arms]
    for low in range(0, RESAMPLES, rows):
        chunk = starts[low : low + rows]
        picks = ((chunk[:, :, None] + np.arange(block)) % count).reshape(len(chunk), -1)[:, :count]
        for arm, figures in zip(samples, found, strict=True):
            figures.append(getattr(np, statistic)(arm[picks], axis=1))
    return [np.concatenate(figures) for figures in found]


@lru_cache(maxsize=4)
def _block_starts(count: int) -> tuple[NDArray[np.int64], int]:
    import numpy as np

    block = math.ceil(count ** (1 / 3))
    blocks = math.ceil(count / block)
    rng = Random(count)
    starts = [int(rng.random() * count) for _ in range(RESAMPLES * blocks)]
    return np.array(starts, dtype=np.int64).reshape(RESAMPLES, blocks), block


def middle(found: Samples) -> Interval:
    """Return the middle 95 % of the resampled values."""
    ordered = sorted(found)
    cut = int(len(ordered) * (1 - COVERAGE) / 2)
    return Interval(lo=float(ordered[cut]), hi=float(ordered[len(ordered) - 1 - cut]))
