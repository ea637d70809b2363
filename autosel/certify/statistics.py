"""What a list of step times says: median, quantiles, and intervals that neighbouring samples do not flatter.

Every figure is a closed function of the samples, without interpolation tables or a library's generator: whoever
recomputes it from a certificate gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]

COVERAGE = 0.95
RESAMPLES = 2000
FEWEST_TO_RESAMPLE = 8  # below it an interval is the whole range of the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`lo`..`hi` covers the true value in 95 % of runs like this one."""

    lo: float
    hi: float


def median(values: Sequence[float]) -> float:
    """The middle of the sorted values; the mean of both middles of an even number."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank): a time that was measured."""
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def median_interval(values: Sequence[float]) -> Interval:
    """Where the median of such steps lies."""
    if len(values) < FEWEST_TO_RESAMPLE:
        return Interval(lo=float(min(values)), hi=float(max(values)))
    return middle(resampled_medians(values)[0])


def speedup_interval(baseline: Sequence[float], optimised: Sequence[float], kept: Sequence[float] = ()) -> Interval:
    """Where baseline median / optimised median lies, for samples taken in pairs: a pair is drawn as a whole, so what
    slowed both at once cancels. Times the mean of `kept`, the tokens that each optimised step gave for the baseline's
    one, where there are any."""
    if len(baseline) < FEWEST_TO_RESAMPLE:
        few, many = (min(kept), max(kept)) if kept else (1, 1)
        return Interval(lo=min(baseline) / max(optimised) * few, hi=max(baseline) / min(optimised) * many)
    return middle(resampled_speedups(baseline, optimised, kept))


def trials_interval(values: Sequence[float]) -> Interval | None:
    """Return where the median of independent trials lies; None of fewer than eight."""
    return median_interval(values) if len(values) >= FEWEST_TO_RESAMPLE else None


def ratio_interval(now: Sequence[float], before: Sequence[float]) -> Interval | None:
    """Return where the ratio of two runs' medians lies, which were taken apart; None if one has fewer than eight."""
    if min(len(now), len(before)) < FEWEST_TO_RESAMPLE:
        return None
    above, below = resampled_medians(now)[0], resampled_medians(before)[0]
    return middle(above / below[::-1])  # reversed: equal picks of two runs have nothing in common


def resampled_speedups(baseline: Sequence[float], optimised: Sequence[float], kept: Sequence[float] = ()) -> Figures:
    slow, fast = resampled_medians(baseline, optimised)
    return slow / fast * (resampled(np.mean, kept)[0] if kept else 1.0)


def resampled_medians(*arms: Sequence[float]) -> list[Figures]:
    return resampled(np.median, *arms)


def resampled(statistic: Callable[..., Any], *arms: Sequence[float]) -> list[Figures]:
    """The statistic of each arm in each of 2000 resamples of their common indices.

    A resample is made of circular blocks of ceil(n^(1/3)) neighbours (Politis and Romano 1992), because a disturbance
    lasts longer than a step. The blocks are drawn from Python's own generator, whose `random()` never changes.
    """
    samples = [np.asarray(arm, dtype=np.float64) for arm in arms]
    count = len(samples[0])
    starts, block = _block_starts(count)
    rows = max(1, (1 << 21) // count)  # at a time, so that 20 000 steps need no gigabyte
    found: list[list[Figures]] = [[] for _ in arms]
    for low in range(0, RESAMPLES, rows):
        chunk = starts[low : low + rows]
        picks = ((chunk[:, :, None] + np.arange(block)) % count).reshape(len(chunk), -1)[:, :count]
        for arm, figures in zip(samples, found, strict=True):
            figures.append(statistic(arm[picks], axis=1))
    return [np.concatenate(figures) for figures in found]


@lru_cache(maxsize=4)
def _block_starts(count: int) -> tuple[NDArray[np.int64], int]:
    block = math.ceil(count ** (1 / 3))
    blocks = math.ceil(count / block)
    rng = Random(count)
    starts = [int(rng.random() * count) for _ in range(RESAMPLES * blocks)]
    return np.array(starts, dtype=np.int64).reshape(RESAMPLES, blocks), block


def middle(found: Figures) -> Interval:
    """The middle 95 % of what the resamples gave."""
    ordered = np.sort(found)
    cut = int(len(ordered) * (1 - COVERAGE) / 2)
    return Interval(lo=float(ordered[cut]), hi=float(ordered[len(ordered) - 1 - cut]))
