"""Imitate common rules for choosing a kernel, in a few lines each, to see what they decide on given samples.

A rule takes the times of two arms, with the samples in order along the last axis. For each race (the leading axes) it
returns whether the second arm replaces the first. These are imitations of decision rules, not the peers' code:
PyTorch's TunableOp keeps the lowest mean, Triton's autotuner the lowest median or minimum, and tuners with a margin
require a few per cent. Textbook tests are included as they are commonly used: on blocks, or evaluated after every
pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autosel.race.evidence import student

Times = NDArray[np.float64]
Promoted = NDArray[np.bool_]
P_VALUE = 0.01
FIRST_LOOK = 10  # pairs before the first look of the peeking t test


def margin(delta: float) -> Callable[[Times, Times], Promoted]:
    def decide(base: Times, own: Times) -> Promoted:
        return np.median(base, -1) > (1 + delta) * np.median(own, -1)

    return decide


def mann_whitney(base: Times, own: Times) -> Promoted:
    """Apply a one-sided Mann-Whitney test at p < .01: normal approximation with continuity and tie correction."""
    n, m = base.shape[-1], own.shape[-1]
    if base.ndim > 1:  # race by race, since all pairwise comparisons of a race are in memory at once
        rows = zip(base.reshape(-1, n), own.reshape(-1, m), strict=True)
        return np.array([bool(mann_whitney(b, o)) for b, o in rows]).reshape(base.shape[:-1])
    faster = (own[:, None] < base).sum() + 0.5 * (own[:, None] == base).sum()
    _, ties = np.unique(np.concatenate((base, own)), return_counts=True)
    total = n + m
    variance = n * m / 12 * (total + 1 - (ties.astype(float) ** 3 - ties).sum() / (total * (total - 1)))
    if variance <= 0:
        return np.asarray(False)
    return np.asarray((faster - n * m / 2 - 0.5) / variance**0.5 > NormalDist().inv_cdf(1 - P_VALUE))


def peeking_t(base: Times, own: Times) -> Promoted:
    """Apply a paired one-sided t test of log ratios at p < .01 after every pair from the tenth on."""
    logs = np.log(base) - np.log(own)
    n = np.arange(1, logs.shape[-1] + 1)
    mean = np.cumsum(logs, -1) / n
    square = np.maximum(np.cumsum(logs**2, -1) / n - mean**2, 1e-300)
    late = slice(FIRST_LOOK - 1, None)
    t = mean[..., late] * np.sqrt(n[late] - 1) / np.sqrt(square[..., late])
    limits = np.array([student(int(count) - 1, 1 - 2 * P_VALUE) for count in n[late]])
    return np.asarray((t > limits).any(-1))


RULES: Mapping[str, Callable[[Times, Times], Promoted]] = {
    "least mean": lambda base, own: own.mean(-1) < base.mean(-1),
    "least minimum": lambda base, own: own.min(-1) < base.min(-1),
    "lower median": margin(0.0),
    "median 2 % lower": margin(0.02),
    "median 5 % lower": margin(0.05),
    "Mann-Whitney, p < .01": mann_whitney,
    "peeking t test, p < .01": peeking_t,
}
PAIRED = (peeking_t,)  # sample i of both arms belongs together, so the rule does not apply to blocks
