"""How much to measure: fixed from the baseline's time alone, so that no candidate can shorten its own trial.

Short form (a call up to 1 ms): pairs of 8 samples, each of at least 400 us of the baseline, 30 to 200 pairs.
Long form (above): a sample is one call, pairs of 2 samples, 12 to 60 pairs. delta is the smallest effect that can be
promoted: 2 % or four clock quanta once 59 A/A sessions of this device and time class have not crossed at it, 5 % until
then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SAMPLE_NS = 400_000
LONG_CALL_NS = 1_000_000
CLOCK_NS = 100  # perf_counter_ns and the call around it, measured both ways on Linux
SESSIONS = 3
AA_SESSIONS = 59  # none of 59 crossing gives pi <= .05 with 95 % confidence
DELTA_CALIBRATED = 0.02
DELTA_UNCALIBRATED = 0.05
MAX_TAIL_SAMPLES = 720
VOIDS_ALLOWED = 3

TimeClass = Literal["short", "long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One workload's trial: the same for every arm."""

    time_class: TimeClass
    calls: int  # a sample
    samples: int  # a pair and arm
    min_pairs: int
    max_pairs: int
    screening_pairs: int
    tail_samples: int  # after which an unsettled tail stays unsettled

    @property
    def probe_every(self) -> int:
        """Pairs between two read probes."""
        return 10


def plan(baseline_ns: float) -> Plan:
    """The plan for a baseline that takes `baseline_ns` a call."""
    if baseline_ns > LONG_CALL_NS:
        return Plan(
            time_class="long",
            calls=1,
            samples=2,
            min_pairs=12,
            max_pairs=60,
            screening_pairs=14,
            tail_samples=MAX_TAIL_SAMPLES,
        )
    calls = max(1, -(-SAMPLE_NS // max(1, int(baseline_ns))))
    # Three sessions of 30 pairs are 720 samples already: what clears the tail at .96 has to go on to clear it at .99.
    return Plan(
        time_class="short",
        calls=calls,
        samples=8,
        min_pairs=30,
        max_pairs=200,
        screening_pairs=30,
        tail_samples=2 * MAX_TAIL_SAMPLES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The minimum effect and the error it buys."""

    delta: float
    alpha_session: float
    pi: float  # P(an A/A session crosses at delta), upper bound at 95 %; alpha_session where not yet calibrated
    calibrated: bool

    @property
    def false_promotion_bound(self) -> float:
        return max(self.pi, self.alpha_session) ** SESSIONS


def margin(aa_sessions: int, aa_crossings: int, sample_ns: float, alpha_session: float = 0.05) -> Margin:
    """delta and pi from this device's A/A history in a time class."""
    quantum = 4 * CLOCK_NS / max(sample_ns, 1.0)
    if aa_sessions >= AA_SESSIONS:
        upper = clopper_pearson_upper(aa_sessions, aa_crossings)
        if upper <= alpha_session + 1e-9 or aa_crossings == 0:
            return Margin(delta=max(DELTA_CALIBRATED, quantum), alpha_session=alpha_session, pi=upper, calibrated=True)
    return Margin(
        delta=max(DELTA_UNCALIBRATED, quantum), alpha_session=alpha_session, pi=alpha_session, calibrated=False
    )


def clopper_pearson_upper(n: int, x: int, confidence: float = 0.95) -> float:
    """Upper limit of a binomial rate: the p at which P[Bin(n, p) <= x] = 1 - confidence, by bisection."""
    from math import comb

    if x >= n:
        return 1.0
    low, high = x / n, 1.0
    for _ in range(60):
        p = (low + high) / 2
        below = sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(x + 1))
        low, high = (p, high) if below > 1 - confidence else (low, p)
    return high
