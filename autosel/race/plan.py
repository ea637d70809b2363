"""The amount of measurement: fixed by the baseline's time alone, so that no candidate can shorten its own trial.

Short form (a call up to 1 ms): pairs of 8 samples, each of at least 400 us of the baseline, 30 to 200 pairs. Long form
(above): a sample is one call, pairs of 2 samples, 12 to 60 pairs. delta is the smallest effect that can be promoted: 2
% or four clock quanta after the A/A sessions of this device and time class show that they rarely cross at it (59 in a
row do), 5 % before that.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import exp, fsum, lgamma, log, log1p
from typing import Literal

from autosel.race.evidence import ALPHA_SESSION

SAMPLE_NS = 400_000
LONG_CALL_NS = 1_000_000
WAKE_BELOW_NS = 10_000_000  # waking a team costs about 50 us: negligible for a longer call
CLOCK_NS = 100  # perf_counter_ns and the call around it, measured both ways on Linux
SESSIONS = 3
AA_SESSIONS = 59  # none of 59 crossing gives pi <= .05 with 95 % confidence
AA_LIMIT = Fraction(1, 20)  # of pi: alpha_s
AA_CONFIDENCE = 20  # 1 / .05: evidence that pi <= AA_LIMIT
AA_ALL_QUIET = Fraction(97, 100)  # prior weight of "they never cross": the least for which 59 quiet ones suffice
DELTA_CALIBRATED = 0.02
DELTA_UNCALIBRATED = 0.05
# If one sample in twenty is slow in both arms, 720 samples leave 3 % of all attempts undecided, these .3 %.
MAX_TAIL_SAMPLES = 1080
VOIDS_ALLOWED = 3

TimeClass = Literal["short", "long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """One workload's trial: the same for every arm."""

    time_class: TimeClass
    calls: int  # per sample
    samples: int  # per pair and arm
    min_pairs: int
    max_pairs: int
    screening_pairs: int
    tail_samples: int = MAX_TAIL_SAMPLES  # after these an unsettled tail stays unsettled
    wakes: bool = True  # an untimed call precedes the samples


def plan(baseline_ns: float) -> TrialPlan:
    if baseline_ns > LONG_CALL_NS:
        wakes = baseline_ns < WAKE_BELOW_NS
        return TrialPlan(
            time_class="long", calls=1, samples=2, min_pairs=12, max_pairs=60, screening_pairs=14, wakes=wakes
        )
    calls = max(1, -(-SAMPLE_NS // max(1, int(baseline_ns))))
    return TrialPlan(time_class="short", calls=calls, samples=8, min_pairs=30, max_pairs=200, screening_pairs=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The minimum effect and its error probability."""

    delta: float
    alpha_session: float
    pi: float  # P(an A/A session crosses at delta), upper bound at 95 %; alpha_session until calibrated
    calibrated: bool

    @property
    def false_promotion_bound(self) -> float:
        return max(self.pi, self.alpha_session) ** SESSIONS


def margin(aa_sessions: int, aa_crossings: int, sample_ns: float) -> Margin:
    """Return delta and pi from this device's A/A history in a time class."""
    found = calibrated(aa_sessions, aa_crossings)
    delta = max(DELTA_CALIBRATED if found else DELTA_UNCALIBRATED, 4 * CLOCK_NS / max(sample_ns, 1.0))
    pi = clopper_pearson_upper(aa_sessions, aa_crossings) if found else ALPHA_SESSION
    return Margin(delta=delta, alpha_session=ALPHA_SESSION, pi=pi, calibrated=found)


@cache
def calibrated(sessions: int, crossings: int) -> bool:
    """Return True if this many crossings show pi <= AA_LIMIT with 95 % confidence, however often it is tested.

    A history grows with every tune and is tested after each session: an interval for a fixed number of sessions would
    finally clear one device in five whose pi is at the limit. Therefore a likelihood ratio against a larger pi, as for
    pairs: of "never", and of all rates in (0, AA_LIMIT) alike.
    """
    if crossings >= AA_LIMIT * sessions:
        return False
    a, b = AA_LIMIT.as_integer_ratio()
    never = Fraction(b, b - a) ** sessions if crossings == 0 else 0
    above = b ** (sessions + 1) - sum(_masses(sessions + 1, crossings, a, b))
    rarely = Fraction(above, a * (sessions + 1) * _masses(sessions, crossings, a, b)[-1])
    return AA_ALL_QUIET * never + (1 - AA_ALL_QUIET) * rarely >= AA_CONFIDENCE


def _masses(n: int, most: int, a: int, b: int) -> list[int]:
    """Return P[Bin(n, a/b) = k] for k up to `most`, times b^n: integers, each computed from the previous one."""
    masses = [(b - a) ** n]
    for k in range(most):
        masses.append(masses[-1] * (n - k) * a // ((k + 1) * (b - a)))
    return masses


def quiet_sessions_needed(sessions: int, crossings: int) -> int:
    """Return the number of further A/A sessions, none of them crossing, that would calibrate this device."""
    enough = 1
    while not calibrated(sessions + enough, crossings):
        enough *= 2
    return bisect_left(range(enough), True, key=lambda more: calibrated(sessions + more, crossings))


def clopper_pearson_upper(n: int, x: int, confidence: float = 0.95) -> float:
    """Return the upper limit of a binomial rate: the p at which P[Bin(n, p) <= x] = 1 - confidence, by bisection."""
    if x >= n:
        return 1.0
    ways = [lgamma(n + 1) - lgamma(j + 1) - lgamma(n - j + 1) for j in range(x + 1)]  # logs: comb(n, j) passes 1e308
    low, high = x / n, 1.0
    for _ in range(60):
        p = (low + high) / 2
        won, lost = log(p), log1p(-p)
        below = fsum(exp(w + j * won + (n - j) * lost) for j, w in enumerate(ways))
        low, high = (p, high) if below > 1 - confidence else (low, p)
    return high
