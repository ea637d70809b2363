"""Select the calls to check, by the distribution of gaps between checks. No torch, no clock.

The first CANARY calls of a bucket in a process are all checked; for long calls (a prompt's products take seconds) as
many as FIRST_NS pays for, but at least LEAST. After them each call is checked with probability p, independently. The
distance to the next check is drawn from the geometric distribution, so that a call costs a countdown instead of a
random number, and no period of the model (32 layers, 2000 calls) can hide from it. A fault that shows in a share f of
the calls is found within ln(100) / (p f) calls in 99 of 100 cases.

For the first FRESH_CHECKS checks p is ten times the rate: faults appear after a restart, with another driver or in a
new bucket. Unless the user set the rate, p is limited so that the checks use at most MAX_SHARE of the bucket's time:
the float64 rows of a kernel that takes a microsecond take a millisecond.

These are shadow checks, which also run the baseline. If a native spot check exists (guard/spot.py), a call without a
shadow check has a spot check with probability `spot_rate`, independently. A fault of whole results that shows in a
share f of the calls is found within ln(20) / (spot_rate f) calls in 95 of 100 cases, 73 / f by default.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from random import Random, SystemRandom

from autosel import settings

CANARY = 32  # sgl-project/sglang PR 34412 checks one output, then trusts
LEAST = 4
FIRST_NS = 1_000_000_000  # the first request that uses a kernel waits for its checks
FRESH_CHECKS = 100  # finds a fault of rate 4.5 % in 99 of 100 cases: 1 - 0.01^(1/100)
FRESH_FACTOR = 10
# By the guard's own clock, which measures only the check. The additional time of a check's step and the next one was
# measured as 2.2 to 2.6 times that (docs/daemon.md: about 10 ms more each): for a step of 4.4 ms 0.73 % with a share of
# 0.2 %, and 0.31 % with 0.06 %; by that line 0.2 % with this one. A decode step may lose at most 0.3 %, spot checks
# included.
MAX_SHARE = 0.0002
NEVER = (1 << 30) - 1  # the largest countdown that Python keeps in one digit; then it is drawn again


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How much is checked. `shadow_rate` 0 means only the first calls. `max_share` and `first_ns` inf mean no limit."""

    on: bool = True
    shadow_rate: float = 1 / 2000
    spot_rate: float = 1 / 25
    max_share: float = MAX_SHARE
    first_ns: float = FIRST_NS

    @staticmethod
    def from_settings() -> Policy:
        found = settings.read()
        rate, spots = found["shadow_rate"], found["spot_rate"]
        return Policy(
            on=settings.get("guard") == "on",
            shadow_rate=min(1.0, rate.value),
            spot_rate=min(1.0, spots.value) if rate.value else 0.0,
            max_share=MAX_SHARE if rate.origin == "default" else math.inf,
        )


def _latest() -> deque[float]:
    return deque(maxlen=15)


@dataclass(slots=True, kw_only=True)
class CheckRate:
    """Count of one bucket's checks, and the gaps between them."""

    policy: Policy
    random: Random = field(default_factory=SystemRandom)  # a forked process draws its own numbers
    checks: int = 0
    first: int = CANARY  # calls that are all checked
    spent_ns: float = 0.0  # time spent on their checks
    in_service: bool = False  # `own` has times from between checks
    spots: bool = False  # a spot check exists
    own: deque[float] = field(default_factory=_latest)
    extra: deque[float] = field(default_factory=_latest)

    @property
    def canary(self) -> bool:
        return self.checks < self.first

    @property
    def deep(self) -> bool:
        """Return True if the next check computes float64 rows.

        Three of the first calls do: all 32 may be in the first token of a model with 32 layers. The others compare the
        whole result with the baseline's.
        """
        return self.checks in (0, 7) or self.checks + 1 >= self.first

    @property
    def probability(self) -> float:
        """Return the probability that the next call is checked."""
        p = self.shadow
        return p if p >= 1.0 or not self.spots else p + (1.0 - p) * self.policy.spot_rate

    def draws_shadow(self) -> bool:
        """Return True if the next checked call has a shadow check, False for a spot check."""
        p = self.shadow
        return p >= 1.0 or not self.spots or self.random.random() * self.probability < p

    @property
    def shadow(self) -> float:
        """Return the probability that the next call has a shadow check."""
        if self.canary:
            return 1.0
        fresh = self.checks < self.first + FRESH_CHECKS
        p = min(1.0, self.policy.shadow_rate * (FRESH_FACTOR if fresh else 1))
        extra = self.extra_ns
        return min(p, self.policy.max_share * self.own_ns / extra) if extra > 0 else p

    def gap(self) -> int:
        """Return the number of calls up to and including the next check."""
        p = self.probability
        if p >= 1.0:
            return 1
        if p <= 0.0:
            return NEVER
        # Geometric by inversion; 1 - random() is in (0, 1].
        return min(NEVER, 1 + int(math.log(1.0 - self.random.random()) / math.log1p(-p)))

    def checked(self, own_ns: float, extra_ns: float, *, natural: bool = True) -> None:
        """Count a check: the call itself took `own_ns`, the check `extra_ns` more.

        `natural` means that the call ran before the rest of the check, with the caches as in service. After the first
        calls, whose checks follow each other, only such times count: a cold call takes several times as long, and would
        allow several times as many checks.
        """
        if natural and not self.canary and not self.in_service:
            self.own.clear()
            self.in_service = True
        if natural or not self.in_service:
            self.own.append(own_ns)
        if self.deep:
            self.extra.append(extra_ns)
        if self.canary:
            self.spent_ns += extra_ns
        self.checks += 1
        if self.canary and self.checks >= LEAST and self.spent_ns > self.policy.first_ns:
            self.first = self.checks

    @property
    def own_ns(self) -> float:
        """Return a call's time: in service the shortest, because a check only adds time; for the first calls the
        median.
        """
        if self.in_service:
            return min(self.own)
        return statistics.median(self.own) if self.own else 0.0

    @property
    def extra_ns(self) -> float:
        """Return the time that a check with float64 rows adds: the mean, because that is the cost."""
        return statistics.fmean(self.extra) if self.extra else 0.0
