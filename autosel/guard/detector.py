"""Detect that a served arm has become slower than the baseline: an e-detector over shadow pairs, without torch or
clock.

    M <- (M + 1) (1 + 0.4 s),   s = +1 if the served arm lost the pair, else -1;   demote at M >= 10^4

While it loses at most half of the pairs, M minus the number of pairs is a supermartingale: the mean run length to a
false alarm is at least 10^4 pairs, for any noise (e-detectors: Shin, Ramdas and Rinaldo, arXiv 2203.03532). A coin flip
orders each pair, so position and drift favour neither arm.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 0.4
ALARM = 1e4
MIN_DWELL_S = 3600.0  # promotion needs a margin, demotion does not: a new promotion lasts at least an hour


@dataclass(slots=True)
class Detector:
    value: float = 0.0
    pairs: int = 0
    lost: int = 0

    def add(self, lost: bool) -> None:
        """Add a pair; a tie is not a loss."""
        self.pairs += 1
        self.lost += lost
        self.value = (self.value + 1) * (1 + STEP if lost else 1 - STEP)

    @property
    def alarm(self) -> bool:
        return self.value >= ALARM
