"""Find the best of many settings and its gain over a given one: successive halving, then fresh pairs.

Every figure is a ratio to the closed form's reading of the same visit, so that drift cancels. The sweep only
nominates; its readings are discarded, since the minimum of many noisy readings is too low (by 3.2 % for 1000 at 1 %
noise). The nominees are compared with the closed form in fresh visits. The best one is chosen on one half of these
visits and judged on the other half, in both directions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

Setting = Mapping[str, object]
Times = dict[str, list[float]]  # arm -> microseconds a call, one a visit

SIDE_BY_SIDE = 12  # arms of a visit in addition to the closed form; with more, the machine drifts within a visit
NOMINEES = 3
CLEARLY = 1.3  # a value that is slower by this factor alone is not combined, if time is short
KNOWN = 0.004  # a score with this standard error needs no more readings
LEAST_READINGS = 3  # before a standard error is estimated
LEAST_VISITS = 16  # minimum visits of the final
NARROW = 0.016  # width of the interval at which the final ends
LOOK_S = 0.5  # between two checks of the interval and of other load
PATIENCE = 2.0  # lost time at which the final ends, in multiples of its time
RESAMPLES = 200


class ArmTimes(Protocol):
    """Interface that reads the times of arms."""

    def visit(self, order: Sequence[str]) -> dict[str, float] | None:
        """Return one reading of each arm, in this order, in microseconds a call; None if the visit was disturbed."""

    def quiet(self) -> bool:
        """Return True if no other process worked since the last call."""

    def now(self) -> float:
        """Return the time in seconds."""


# --- the sweep --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class HalvingSweep:
    """The nominees of a sweep, and how they were found."""

    readings: int = 0
    left_out: int = 0  # settings with a value that was clearly slower alone
    nominees: list[str] = field(default_factory=list)


def nominate(
    bench: ArmTimes, closed: str, rivals: Mapping[str, Setting], given: Setting, *, seconds: float, rng: Random
) -> HalvingSweep:
    """Return the NOMINEES fastest of `rivals` (name -> setting; the closed form's is `given`), by successive halving.

    Every rung reads all remaining settings at least once and drops the slower half, or three quarters if one reading
    of all takes a quarter of the time. Unused time goes to the next rung. If one reading of each would take more than
    half of the time, single values are tried first.
    """
    found = HalvingSweep()
    ratios: dict[str, list[float]] = {name: [] for name in rivals}
    end, left = bench.now() + seconds, list(rivals)
    if len(left) > NOMINEES:
        left = _affordable(bench, closed, rivals, given, ratios, seconds=seconds, rng=rng)
        found.left_out = len(rivals) - len(left)
    while len(left) > NOMINEES:
        began = bench.now()
        _read(bench, closed, left, ratios, rng)
        dear = bench.now() - began > seconds / 4
        rungs = max(1, math.ceil(math.log2(len(left) / NOMINEES)))
        while bench.now() < began + (end - began) / rungs and not all(_is_sharp(ratios[name]) for name in left):
            _read(bench, closed, left, ratios, rng)
        left = sorted(left, key=lambda name: _score(ratios[name]))[: max(NOMINEES, len(left) // (4 if dear else 2))]
    found.nominees = left
    found.readings = sum(map(len, ratios.values()))
    return found


def _affordable(
    bench: ArmTimes,
    closed: str,
    rivals: Mapping[str, Setting],
    given: Setting,
    ratios: dict[str, list[float]],
    *,
    seconds: float,
    rng: Random,
) -> list[str]:
    """Return all settings if one reading of each takes at most half of the time.

    Otherwise return those without a value that is clearly slower when changed alone. A value that no legal setting
    changes alone is kept.
    """
    before = bench.now()
    bench.visit([closed])
    each = bench.now() - before
    if each * len(rivals) <= seconds / 2:
        return list(rivals)
    single = {name: diff[0] for name, s in rivals.items() if len(diff := _changes(s, given)) == 1}
    doubted = list(single)
    for _ in range(LEAST_READINGS):
        _read(bench, closed, doubted, ratios, rng)
        doubted = [name for name in doubted if _score(ratios[name]) > CLEARLY]
    slow = {single[name] for name in doubted}
    return [name for name, s in rivals.items() if not slow.intersection(_changes(s, given))]


def _changes(setting: Setting, given: Setting) -> list[tuple[str, object]]:
    return [(knob, value) for knob, value in setting.items() if given.get(knob) != value]


def _read(bench: ArmTimes, closed: str, arms: Sequence[str], ratios: dict[str, list[float]], rng: Random) -> None:
    """Read each arm once more, in groups that each contain the closed form."""
    shuffled = rng.sample(list(arms), len(arms))
    for i in range(0, len(shuffled), SIDE_BY_SIDE):
        group = shuffled[i : i + SIDE_BY_SIDE]
        order = [closed, *group]
        rng.shuffle(order)
        times = bench.visit(order)
        if times is not None:
            for name in group:
                ratios[name].append(times[name] / times[closed])


def _score(ratios: Sequence[float]) -> float:
    return statistics.median(ratios) if ratios else math.inf


def _is_sharp(ratios: Sequence[float]) -> bool:
    if len(ratios) < LEAST_READINGS:
        return False
    middle = statistics.median(ratios)
    scatter = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
    return 1.2533 * scatter / math.sqrt(len(ratios)) <= KNOWN * middle


# --- the final --------------------------------------------------------------------------------------------------------


def final(
    bench: ArmTimes, arms: Sequence[str], closed: str, rivals: Sequence[str], *, seconds: float, rng: Random
) -> Times:
    """Visit all arms until the interval is narrow or the time is up; disturbed spells are discarded.

    Only the interval's width ends the final, not its position. The result is empty with too few undisturbed visits.
    """
    kept: Times = {arm: [] for arm in arms}
    spent_s = lost_s = 0.0
    bench.quiet()
    while True:
        start = bench.now()
        spell = _spell(bench, arms, rng)
        took_s = bench.now() - start
        if bench.quiet() and spell[closed]:
            spent_s += took_s
            for arm in arms:
                kept[arm] += spell[arm]
        else:
            lost_s += took_s
        enough = len(kept[closed]) >= LEAST_VISITS
        if enough and (spent_s >= seconds or _is_narrow(kept, closed, rivals, rng)):
            return kept
        if lost_s >= PATIENCE * seconds:
            return kept if enough else {arm: [] for arm in arms}


def _spell(bench: ArmTimes, arms: Sequence[str], rng: Random) -> Times:
    """Visit all arms for LOOK_S, at least once."""
    found: Times = {arm: [] for arm in arms}
    start = bench.now()
    while True:
        times = bench.visit(rng.sample(list(arms), len(arms)))
        if times is not None:
            for arm in arms:
                found[arm].append(times[arm])
        if bench.now() - start >= LOOK_S:
            return found


def _is_narrow(times: Times, closed: str, rivals: Sequence[str], rng: Random) -> bool:
    low, high = interval(times, closed, rivals, rng)
    return high - low <= NARROW


# --- results ----------------------------------------------------------------------------------------------------------


def ratios_of(times: Times, arm: str, over: str) -> list[float]:
    return [a / b for a, b in zip(times[arm], times[over], strict=True)]


def held_out(times: Times, closed: str, rivals: Sequence[str]) -> float:
    """Return the cross-fitted regret: the best is chosen on one half of the visits and judged on the other, both ways.

    The closed form is one of the rivals: if it is the best, the regret of that half is 0.
    """
    count, found = len(times[closed]), []
    for choose, judge in ((0, 1), (1, 0)):
        chosen = {a: _median_ratio(times, a, closed, choose) for a in rivals}
        best = min(chosen, key=lambda arm: chosen[arm])
        judged = [times[closed][i] / times[best][i] for i in range(judge, count, 2)]
        found.append(math.log(statistics.median(judged)))
    return math.exp(statistics.fmean(found)) - 1


def _median_ratio(times: Times, arm: str, over: str, first: int) -> float:
    return statistics.median(times[arm][i] / times[over][i] for i in range(first, len(times[over]), 2))


def interval(times: Times, closed: str, rivals: Sequence[str], rng: Random) -> tuple[float, float]:
    """Return the 95 % interval by resampling whole visits."""
    count = len(times[closed])
    drawn = []
    for _ in range(RESAMPLES):
        picks = [rng.randrange(count) for _ in range(count)]
        drawn.append(held_out({arm: [times[arm][i] for i in picks] for arm in rivals}, closed, rivals))
    drawn.sort()
    return drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40 - 1]
