"""Count the errors of `autosel.race`'s rules on arms of known speed: the cells of the tables in docs/method.md.

Each `Cell` counts how often something happens in many simulated races and states how often it may. The rules are the
same as for real kernels (`session.screen`, `session.confirm`, `judge`); only the timing is synthetic. The common rules
run in the same simulator, where they must fail; otherwise it would show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, repeat
from multiprocessing import get_context
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autosel.guard.detector import ALARM, STEP, Detector
from autosel.ledger.key import LIFETIME_BUDGET
from autosel.race.evidence import ALPHA_SESSION, E_TAIL, crossed
from autosel.race.judge import CLONE, judge
from autosel.race.plan import (
    DELTA_CALIBRATED,
    DELTA_UNCALIBRATED,
    SESSIONS,
    Margin,
    TrialPlan,
    calibrated,
    clopper_pearson_upper,
    plan,
)
from autosel.testing.rates.common import PAIRED, RULES
from autosel.testing.rates.noise import CHUNK, NOISES, Factors, Noise, Scenario, attempt, confirmed, screened, won
from autosel.values import RaceSession

Must = Literal["at most", "at least", "fail", "shown"]
SHORT, LONG = plan(2e3), plan(2e6)
NOMINAL = ALPHA_SESSION**SESSIONS  # error probability of an attempt: 1.25e-4
BLOCK = 100  # samples per arm, if arms are measured one after the other
POWER = 0.99
RETRIES = 20
TAIL_ERROR = 1 / E_TAIL + 0.05  # the gate, and the confidence of its threshold (evidence.quantile_lower)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The number of occurrences; `limit`, if the simulation itself gives the allowed rate."""

    events: int
    races: int
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """A rate with a limit. `must` is at most or at least `limit`, or `fail`: a control that must exceed it under some
    noise."""

    study: str
    what: str
    noise: str
    must: Must
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCell(Limited):
    """One count."""

    count: Callable[[int, Random], Count]
    scale: float = 1.0  # share of the requested number of races

    def measure(self, races: int) -> ErrorRate:
        name = f"{self.study}|{self.what}|{self.noise}"
        found = self.count(max(1, round(races * self.scale)), Random(name))
        return ErrorRate(
            study=self.study,
            what=self.what,
            noise=self.noise,
            must=self.must,
            limit=self.limit if found.limit is None else found.limit,
            events=found.events,
            races=found.races,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRate(Limited):
    """A measured cell."""

    events: int
    races: int

    @property
    def rate(self) -> float:
        return self.events / self.races

    @property
    def slack(self) -> float:
        """Return three standard errors of a rate that is exactly at the limit."""
        return 3 * math.sqrt(self.limit * (1 - self.limit) / self.races)

    @property
    def holds(self) -> bool:
        """Return True if the rate is within its limit; for a control, if it failed beyond chance."""
        if self.must == "at most":
            return self.rate <= self.limit + self.slack
        if self.must == "at least":
            return self.rate >= self.limit - self.slack
        return self.must == "shown" or self.rate > self.limit + self.slack


def measure(cells: Sequence[StudyCell], races: int, jobs: int = 1) -> list[ErrorRate]:
    """Return the cells' rates in order, measured by this many processes."""
    if jobs == 1:
        return [cell.measure(races) for cell in cells]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(StudyCell.measure, cells, repeat(races)))


def broken(rates: Sequence[ErrorRate]) -> list[str]:
    """Return the violations. A control must fail under at least one noise; everything else must hold under each."""
    failed = [r for r in rates if not (r.holds or r.must == "fail")]
    found = [f"{r.study}: {r.what}, {r.noise}: {r.rate:.4g}, {r.must} {r.limit:.4g}" for r in failed]
    controls = dict.fromkeys((r.study, r.what) for r in rates if r.must == "fail")
    for study, what in controls:
        if not any(r.holds for r in rates if (r.study, r.what) == (study, what)):
            found.append(f"{study}: {what} fails under no noise: the simulator is toothless")
    return found


# --- counting with the rules of a race -------------------------------------------------------------------------------


def margin_of(delta: float, pi: float = ALPHA_SESSION) -> Margin:
    return Margin(delta=delta, alpha_session=ALPHA_SESSION, pi=pi, calibrated=delta == DELTA_CALIBRATED)


def setting(ratio: float, noise: str, form: TrialPlan, delta: float, **more: Any) -> Scenario:
    """Return a race with a candidate `same` that is `ratio` times as fast; the times make ties exact."""
    ns = 2_000 if form.time_class == "short" else 2_000_000
    true_ns = {"base": ns * ratio, "same": float(ns)}
    return Scenario(true_ns=true_ns, noise=NOISES[noise], plan=form, margin=margin_of(delta), **more)


def sessions(s: Scenario, races: int, random: Random) -> Count:
    """Count the confirming sessions in which E crossed, one session per race."""
    screening = screened(s, random)
    brief = RaceSession(
        kind="screening", seed=0, arms=screening.arms, pairs=screening.pairs[:1], calls_per_sample=(1, 1)
    )
    crossings = sum(won(s, confirmed(s, ["same"], random, brief), "same") for _ in range(races))
    return Count(events=crossings, races=races)


def attempts(s: Scenario, races: int, random: Random, *, nominate: str = "") -> Count:
    """Count the whole attempts that ended in a promotion."""
    return Count(events=sum(promoted(s, random, nominate) for _ in range(races)), races=races)


def promoted(s: Scenario, random: Random, nominate: str = "") -> bool:
    race = attempt(s, random, nominate=nominate)
    if len(race.sessions) <= SESSIONS:  # `judge` promotes nothing before three confirming sessions, so skip its figures
        return False
    return judge(race).outcome == "promote"


# --- the studies ------------------------------------------------------------------------------------------------------


def identical() -> Iterator[StudyCell]:
    """Race two identical arms, under every noise, at the margins in use."""
    for noise in NOISES:
        cell = partial(StudyCell, study="identical", noise=noise, must="at most")
        for delta in (DELTA_UNCALIBRATED, DELTA_CALIBRATED):
            for form in (SHORT, LONG):
                name = f"one session, {delta:.0%}, {form.time_class}"
                count = partial(sessions, setting(1.0, noise, form, delta))
                yield cell(what=name, count=count, limit=ALPHA_SESSION)
        for form in (SHORT, LONG):
            count = partial(attempts, setting(1.0, noise, form, DELTA_CALIBRATED))
            yield cell(what=f"attempt, {DELTA_CALIBRATED:.0%}, {form.time_class}", count=count, limit=NOMINAL)


def boundary() -> Iterator[StudyCell]:
    """Race a candidate that is faster by exactly the margin, where errors are most likely; also a margin of zero."""
    for noise in NOISES:
        cell = partial(StudyCell, study="boundary", noise=noise, must="at most")
        for form, delta in ((SHORT, DELTA_UNCALIBRATED), (LONG, DELTA_UNCALIBRATED), (LONG, 0.0)):
            s = setting(1 + delta, noise, form, delta)
            name = f"one session, {delta:.0%}, {form.time_class}"
            yield cell(what=name, count=partial(sessions, s), limit=ALPHA_SESSION)
        s = setting(1 + DELTA_UNCALIBRATED, noise, LONG, DELTA_UNCALIBRATED)
        count = partial(attempts, s, nominate="same")
        yield cell(what="attempt, nominated, long", count=count, limit=NOMINAL)


# (true gain, margin): 5 % at the calibrated margin, and 5 % beyond the uncalibrated one.
FASTER = ((1.05, DELTA_CALIBRATED), (1.05 * 1.05, DELTA_UNCALIBRATED))
# If the second visit of a pair costs 3 %, a candidate at most 3 % beyond the margin loses half of its pairs, and so
# would any rival: no rule that compares within pairs can detect it. Such rates are only reported; the power is
# guaranteed from 5 % beyond both.
OUT_OF_REACH = {("position_effect", 1.05)}
BEYOND_THE_SLOT = 1.05 * 1.03


def power() -> Iterator[StudyCell]:
    """Race truly faster candidates."""
    for noise in NOISES:
        slot = [(BEYOND_THE_SLOT, DELTA_CALIBRATED)] if noise == "position_effect" else []
        for form in (SHORT, LONG):
            for ratio, delta in (*FASTER, *slot):
                name = f"{ratio - 1:.0%} faster, {delta:.0%}, {form.time_class}"
                count = partial(attempts, setting(ratio, noise, form, delta))
                must: Must = "shown" if (noise, ratio) in OUT_OF_REACH else "at least"
                yield StudyCell(study="power", what=name, noise=noise, count=count, must=must, limit=POWER)


def three_arms() -> Iterator[StudyCell]:
    """Race a challenger twice as fast as the baseline against an incumbent that is as fast, or 3 % faster."""
    for noise, form, behind in product(NOISES, (SHORT, LONG), (0.0, 0.03)):
        ns = 2_000.0 if form is SHORT else 2_000_000.0
        s = Scenario(
            true_ns={"base": 2 * ns, "incumbent": ns, "same": ns * (1 + behind)},
            noise=NOISES[noise],
            plan=form,
            margin=margin_of(DELTA_CALIBRATED),
            incumbent="incumbent",
        )
        name, count = f"challenger {behind:.0%} slower, {form.time_class}", partial(attempts, s, nominate="same")
        yield StudyCell(study="three arms", what=name, noise=noise, count=count, must="at most", limit=NOMINAL)


def selection() -> Iterator[StudyCell]:
    """Race eight candidates exactly at the margin; screening nominates the best of them."""
    for noise in NOISES:
        s = setting(1 + DELTA_UNCALIBRATED, noise, LONG, DELTA_UNCALIBRATED)
        eight = {"base": s.true_ns["base"]} | {f"candidate {i}": s.true_ns["same"] for i in range(8)}
        name, count = "attempt, 5%, long", partial(attempts, replace(s, true_ns=eight))
        yield StudyCell(study="selection", what=name, noise=noise, count=count, must="at most", limit=NOMINAL)


# --- bias that is constant in a process ------------------------------------------------------------------------------

SPREADS = (0.01, 0.014, 0.02, 0.03)


def session_bias() -> Iterator[StudyCell]:
    """Give each arm a constant bias per session, which averages out over sessions but not over pairs."""
    steady = [("iid", form, spread) for form in (SHORT, LONG) for spread in SPREADS]
    for noise, form, spread in (*steady, *((noise, SHORT, 0.02) for noise in NOISES if noise != "iid")):
        s = setting(1.0, noise, form, DELTA_CALIBRATED, session_spread=spread)
        cell = partial(StudyCell, study="session bias", noise=noise)
        name = f"{spread:.1%} luck, {form.time_class}"
        yield cell(what=f"{name}: pi", count=partial(aa, s), must="shown", limit=1.0)
        yield cell(what=f"{name}: session", count=partial(sessions, s), must="shown", limit=1.0)
        yield cell(what=f"{name}: attempt", count=partial(biased_attempts, s), must="at most", limit=NOMINAL)


def aa(s: Scenario, races: int, random: Random) -> Count:
    """Simulate A/A sessions that calibrate a device: the baseline's clone with a separate bias, alone with the
    baseline."""
    twins = Scenario(
        true_ns={"base": s.true_ns["base"], CLONE: s.true_ns["base"]},
        noise=s.noise,
        plan=s.plan,
        margin=s.margin,
        session_spread=s.session_spread,
    )
    return Count(events=sum(bool(screened(twins, random).aa_crossed) for _ in range(races)), races=races)


def biased_attempts(s: Scenario, races: int, random: Random) -> Count:
    """Compare attempts of a candidate that is not faster with the bound that as many A/A sessions give."""
    calibration = aa(s, races, random)
    found = attempts(s, races, random, nominate="same")
    bound = max(calibration.events / calibration.races, ALPHA_SESSION) ** SESSIONS
    return Count(events=found.events, races=races, limit=bound)


# --- who gets the narrow margin ---------------------------------------------------------------------------------------

LOOKS = 400  # A/A sessions of a device; the calibration is checked after each


def calibration() -> Iterator[StudyCell]:
    """Count the devices that are ever believed to cross in at most 5 % of A/A sessions, by their true rate pi."""
    ours = partial(StudyCell, study="calibration", noise="iid")
    first = first_looks(calibrated)
    usual = first_looks(lambda sessions, crossings: clopper_pearson_upper(sessions, crossings) <= ALPHA_SESSION)
    for pi in (ALPHA_SESSION, 0.07):
        yield ours(what=f"pi {pi:.2f}", count=partial(believed, first, pi), must="at most", limit=ALPHA_SESSION)
    for pi in (0.02, 0.01, 0.0):
        yield ours(what=f"pi {pi:.2f}", count=partial(believed, first, pi), must="shown", limit=1.0)
    yield ours(what="pi 0.05, by an interval", count=partial(believed, usual, 0.05), must="fail", limit=0.05)


def first_looks(shown: Callable[[int, int], bool]) -> list[int]:
    """Return, by number of crossings, the session after which a device is first believed, within LOOKS sessions."""
    looks: list[int] = []
    sessions = 1
    while True:
        sessions = next((n for n in range(sessions, LOOKS + 1) if shown(n, len(looks))), 0)
        if not sessions:
            return looks
        looks.append(sessions)


def believed(looks: Sequence[int], pi: float, races: int, random: Random) -> Count:
    """Count the devices that are believed: for some x, crossing x + 1 comes after look x."""
    gaps = _numpy(random).geometric(max(pi, 1e-12), (races, len(looks)))
    return Count(events=int((np.cumsum(gaps, axis=1) > np.array(looks)).any(axis=1).sum()), races=races)


# --- many attempts ----------------------------------------------------------------------------------------------------


def lifetime() -> Iterator[StudyCell]:
    """Make up to twenty attempts at one key within its budget; compare with twenty tests at .01."""
    cell = partial(StudyCell, study="lifetime", noise="iid", limit=LIFETIME_BUDGET)
    for pi in (ALPHA_SESSION, 0.12):
        s = setting(1 + DELTA_UNCALIBRATED, "iid", LONG, DELTA_UNCALIBRATED)
        count = partial(lives, s, margin_of(DELTA_UNCALIBRATED, pi))
        yield cell(what=f"20 attempts, pi {pi:.2f}", count=count, must="at most", scale=0.25)
    yield cell(what="20 tests at .01", count=naive_lives, must="fail")


def lives(s: Scenario, margin: Margin, races: int, random: Random) -> Count:
    """Count promotions of a candidate exactly at the margin; each attempt debits its bound, as the ledger does."""
    allowed = allowance(margin.false_promotion_bound)
    events = sum(any(promoted(s, random, "same") for _ in range(allowed)) for _ in range(races))
    return Count(events=events, races=races)


def allowance(bound: float) -> int:
    """Return how many of twenty attempts a key's lifetime budget allows."""
    return min(RETRIES, int(LIFETIME_BUDGET * (1 + 1e-9) / bound))


def naive_lives(races: int, random: Random) -> Count:
    """Run one session at E >= 100 twenty times without a budget: 200 fair coins each."""
    rng = _numpy(random)
    limits = np.array([_needed(n, 100) for n in range(1, SHORT.max_pairs + 1)])
    events = 0
    for _ in range(races):
        wins = np.cumsum(rng.random((RETRIES, SHORT.max_pairs)) < 0.5, axis=1)
        events += bool((wins >= limits).any())
    return Count(events=events, races=races)


def _needed(n: int, threshold: int) -> int:
    """Return the smallest number of wins in n pairs that crosses; n + 1 if none does."""
    return next((k for k in range(n + 1) if crossed(n, k, threshold)), n + 1)


# --- the tail ---------------------------------------------------------------------------------------------------------


def tail() -> Iterator[StudyCell]:
    """Race a candidate a fifth faster, with some samples three times as long; the baseline has 3 such samples in 100.

    The baseline's p95 is then close to its slow samples: the threshold must not be one of them.
    """
    demands: tuple[tuple[float, Must, float], ...] = (
        (0.03, "at least", POWER),
        (0.05, "shown", 1.0),
        (0.10, "at most", TAIL_ERROR),
        (0.15, "at most", TAIL_ERROR),
    )
    cell = partial(StudyCell, study="tail", noise="iid", scale=0.5)
    for form in (SHORT, LONG):
        for slow, must, limit in demands:
            s = setting(1.2, "iid", form, DELTA_CALIBRATED, stutters={"base": 0.03, "same": slow})
            name = f"{slow:.0%} slow, {form.time_class}: promoted"
            yield cell(what=name, count=partial(attempts, s), must=must, limit=limit)


# --- the usual rules, in the same simulator ---------------------------------------------------------------------------


def controls() -> Iterator[StudyCell]:
    """Race identical arms by common rules: in blocks, one arm after the other; in pairs, the candidate always first."""
    for noise in NOISES:
        cell = partial(StudyCell, study="controls", noise=noise, must="fail", limit=ALPHA_SESSION)
        for name in RULES:
            yield cell(what=name, count=partial(usual, name, noise))
        s = setting(1.0, noise, SHORT, DELTA_CALIBRATED, fixed_order=True)
        yield cell(what="ours, 2 %, without the coin", count=partial(sessions, s))


def usual(name: str, noise: str, races: int, random: Random) -> Count:
    """Apply a common rule to blocks of 100 samples, or to 100 pairs in fixed order."""
    rule, rng = RULES[name], _numpy(random)
    drawn = (NOISES[noise]() for _ in range(races))
    factors = [(n.factors(rng, 0), n.later_slots) for n in drawn]
    assert 2 * BLOCK <= CHUNK
    times = np.array([f[: 2 * BLOCK] for f, _ in factors])
    if rule not in PAIRED:
        base, own = times[:, :BLOCK], times[:, BLOCK:]
    else:
        own, base = times[:, ::2], times[:, 1::2] * np.array([[later] for _, later in factors])
    return Count(events=int(rule(base, own).sum()), races=races)


# --- demotion ---------------------------------------------------------------------------------------------------------

SHADOW = 1_000  # shadow pairs
SLOWER = 1.05


def demotion() -> Iterator[StudyCell]:
    """Count demotions of a served kernel as fast as the baseline, and of one that becomes slower."""
    for noise in NOISES:
        cell = partial(StudyCell, study="demotion", noise=noise)
        alarms = partial(demoted, noise, 1.0, SHADOW)
        yield cell(what="as fast: within 1000 pairs", count=alarms, must="at most", limit=SHADOW / ALARM)
        found = partial(demoted, noise, SLOWER, SHADOW // 2)
        yield cell(what="5% slower: within 500 pairs", count=found, must="at least", limit=POWER)


def demoted(noise: str, slower: float, pairs: int, races: int, random: Random) -> Count:
    """Simulate shadow pairs of one call per arm, in random order."""
    rng = _numpy(random)
    times = np.array([_one_call_each(NOISES[noise](), rng, pairs) for _ in range(races)])
    served_second = rng.random((races, pairs)) < 0.5
    first, second = times[..., 0], times[..., 1]
    lost = np.where(served_second, slower * second > first, slower * first > second)
    return Count(events=int(alarmed(lost).sum()), races=races)


def alarmed(lost: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each row of pairs if a Detector would ever alarm; computes all rows at once."""
    value, alarm = np.zeros(len(lost)), np.zeros(len(lost), dtype=bool)
    for step in np.where(lost, 1 + STEP, 1 - STEP).T:
        value = (value + 1) * step
        alarm |= value >= ALARM
    return alarm


def _one_call_each(noise: Noise, rng: np.random.Generator, pairs: int) -> Factors:
    """Return the factors of the first and the second call of each pair."""
    chunks = [noise.factors(rng, start) for start in range(0, 2 * pairs, CHUNK)]
    return np.asarray(np.concatenate(chunks)[: 2 * pairs].reshape(pairs, 2) * np.array([1.0, noise.later_slots]))


def _numpy(random: Random) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(random.getrandbits(64)))


STUDIES: Mapping[str, Callable[[], Iterator[StudyCell]]] = {
    "identical": identical,
    "boundary": boundary,
    "power": power,
    "three arms": three_arms,
    "selection": selection,
    "session bias": session_bias,
    "calibration": calibration,
    "lifetime": lifetime,
    "tail": tail,
    "controls": controls,
    "demotion": demotion,
}


# --- demotion: not a rate but a length --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Shadow pairs until the guard's detector alarms, if the promoted kernel loses with this probability."""

    lost: float
    mean: float
    error: float  # standard error of the mean
    p95: float
    runs: int

    @property
    def holds(self) -> bool:
        """Return True if at even odds the mean number of pairs to a false alarm is at least 10^4."""
        return self.lost > 0.5 or self.mean + 3 * self.error >= ALARM


def run_lengths(runs: int) -> list[Length]:
    return [length(lost, runs, Random(f"demotion {lost}")) for lost in (0.5, 0.6, 0.75, 0.9, 1.0)]


def length(lost: float, runs: int, random: Random) -> Length:
    taken = np.array([run_length(lost, random) for _ in range(runs)])
    error = float(taken.std(ddof=1)) / runs**0.5
    return Length(lost=lost, mean=float(taken.mean()), error=error, p95=float(np.quantile(taken, 0.95)), runs=runs)


def run_length(lost: float, random: Random) -> int:
    detector = Detector()
    while not detector.alarm:
        detector.add(random.random() < lost)
    return detector.pairs
