"""The two statistics that a promotion rests on, in exact integers, and the intervals that are only reported.

E(n, k), for pairs. w_i = 1 if the rival's time is more than (1 + delta) times the candidate's; k wins in n pairs. The
likelihood ratio against a win probability of 1/2, averaged uniformly over win probabilities in (1/2, 1]:

    E(n, k) = sum_{j<=k} C(n+1, j) / ((n+1) C(n, k))

is a supermartingale if P(w_i = 1 | past) <= 1/2, so by Ville's inequality P(E ever reaches 1/alpha) <= alpha: a test
after every pair is allowed. The coin that orders each pair forces P(win) <= 1/2 for identical arms under any drift,
autocorrelation, periodicity or position effect, with no noise model.

E_tail(n, x), for slow samples. x of n samples beyond the threshold; likelihood ratio against a rate of p0 = 1/10,
averaged over rates in (0, p0). It must show that the candidate's tail is no heavier than the baseline's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import comb, cos, exp, fsum, log, pi, sin, sqrt, tan

from autosel.values import Reruns

ALPHA_SESSION = 0.05
E_PAIRS = 20  # 1 / ALPHA_SESSION
E_TAIL = 100
TAIL_RATE_INVERSE = 10  # p0 = 1/10
NONE_YET = Reruns()


@cache
def _pairs_fraction(n: int, k: int) -> tuple[int, int]:
    return sum(comb(n + 1, j) for j in range(k + 1)), (n + 1) * comb(n, k)


def e_pairs(n: int, k: int) -> float:
    """Return E(n, k) as a float, for display; decisions compare integers with `crossed`."""
    assert 0 <= k <= n
    top, bottom = _pairs_fraction(n, k)
    return top / bottom


def crossed(n: int, k: int, threshold: int = E_PAIRS) -> bool:
    """Return E(n, k) >= threshold, in integers."""
    top, bottom = _pairs_fraction(n, k)
    return top >= threshold * bottom


def futile(n: int, k: int, threshold: int = E_PAIRS) -> bool:
    """Return the same evidence for the opposite: the candidate wins by delta in less than half of the pairs."""
    return crossed(n, n - k, threshold)


def _tail_likelihood(n: int, x: int) -> int:
    """Return (n+1) C(n,x) p0^x (1-p0)^(n-x), times 10^(n): an integer, because p0 = 1/10."""
    return int((n + 1) * comb(n, x) * 9 ** (n - x))


@cache
def _binomial_upper(n: int, x: int) -> int:
    """Return P[Bin(n, 1/10) >= x] times 10^n, by the complement: few of many samples are slow."""
    return int(10**n - sum(comb(n, j) * 9 ** (n - j) for j in range(x)))


def tail_crossed(n: int, x: int, threshold: int = E_TAIL) -> bool:
    """Return E_tail(n, x) = P[Bin(n+1,p0) >= x+1] / ((n+1) C(n,x) p0^(x+1) (1-p0)^(n-x)) >= threshold, in integers."""
    return _binomial_upper(n + 1, x + 1) >= threshold * _tail_likelihood(n, x)


def tail_futile(n: int, x: int, threshold: int = E_PAIRS) -> bool:
    """Return the same ratio averaged over rates in (p0, 1]: the tail is too heavy, and more samples are useless."""
    lower = int(10 ** (n + 1)) - _binomial_upper(n + 1, x + 1)  # P[Bin(n+1, p0) <= x], times 10^(n+1)
    # over (1-p0) = 9/10 and (n+1) C p0^x (1-p0)^(n-x) at 10^n: the common 10^(n+1) cancels into the 9
    return lower >= threshold * 9 * _tail_likelihood(n, x)


# --- reported, never decided on ---------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def quantile(values: Sequence[float], q: float) -> float:
    """Return the linear interpolation between order statistics (Hyndman-Fan type 7)."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def quantile_lower(values: Sequence[float], q: float, confidence: float = 0.95) -> float:
    """Return a distribution-free lower confidence limit of the q-quantile: the largest of the order statistics X_(k)
    with P[Bin(n, q) >= k] >= confidence; the least value if n is too small for any.
    """
    ordered, n = sorted(values), len(values)
    k, exactly = n, q**n
    at_least = exactly  # P[Bin(n, q) >= k]
    while at_least < confidence and k > 1:
        exactly *= k / (n - k + 1) * (1 - q) / q
        at_least += exactly
        k -= 1
    return ordered[k - 1]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a distribution-free interval for the median from order statistics; the range if n is too small."""
    ordered, n = sorted(values), len(values)
    tail = (1 - confidence) / 2 * 2**n
    below, rank = 0, 0
    while rank < n // 2 and below + comb(n, rank) <= tail:
        below += comb(n, rank)
        rank += 1
    low = max(rank - 1, 0)
    return ordered[low], ordered[n - 1 - low]


def rerun_interval(medians: Sequence[float], reruns: Reruns = NONE_YET) -> tuple[float, float]:
    """Return the 95 % interval for the mean that another run of as many sessions gives; the value itself if nothing
    shows a spread.

    `medians`: ratios, each of a separate process. Student's prediction interval for the difference of two means of n
    logarithms. Its variance is 2/n of that of one session; what differed between whole runs on this device is pooled
    with it, since the sessions of one run are minutes apart and miss what changes more slowly.
    """
    logs = [log(value) for value in medians]
    mean, n = fsum(logs) / len(logs), len(logs)
    degrees = n - 1 + reruns.degrees
    if not degrees:
        return medians[0], medians[0]
    variance = (fsum((x - mean) ** 2 for x in logs) * 2 / n + reruns.degrees * reruns.variance) / degrees
    half = student(degrees, 0.95) * sqrt(variance)
    return exp(mean - half), exp(mean + half)


def pooled(runs: Iterable[Sequence[float]]) -> Reruns:
    """Return the spread of repeated runs; each sequence has the ratios of one pair of arms, one of each run."""
    logs = [[log(value) for value in ratios] for ratios in runs]
    degrees = sum(len(one) - 1 for one in logs)
    squares = fsum((x - fsum(one) / len(one)) ** 2 for one in logs for x in one)
    return Reruns(degrees=degrees, variance=2 * squares / degrees) if degrees else NONE_YET


@cache
def student(degrees: int, confidence: float) -> float:
    """Return t with P[|T| <= t] = confidence for Student's T, by bisection of its angle atan(t / sqrt(degrees))."""
    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(degrees, middle) < confidence else (low, middle)
    return sqrt(degrees) * tan(low)


def _within(degrees: int, angle: float) -> float:
    """Return P[|T| <= sqrt(degrees) tan(angle)]: the finite series 26.7.3 and 26.7.4 of Abramowitz and Stegun."""
    odd = degrees % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= sin(angle)
    return 2 / pi * (angle + total) if odd else total
