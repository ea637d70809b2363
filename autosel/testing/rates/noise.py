"""Simulate candidates with known speed, to test the rules that judge real kernels.

A `Noise` gives the factor by which a call takes longer than its true time at each moment of a session. `Bench` is an
`Instrument`: it keeps its own clock, so drift, clock states and interference depend on when and in which position an
arm is visited. `attempt` drives the rules as the pipeline does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from autosel.race.judge import CLONE, favoured, has_lost, has_won, leaders, nominees
from autosel.race.plan import SESSIONS, Margin, TrialPlan
from autosel.race.session import Duel, SessionRules, confirm, screen
from autosel.values import Race, RaceSession, Workload

Factors = NDArray[np.float64]
WORK = Workload(op="rmsnorm", dims=(("M", 1), ("d", 4096)), dtype="bf16")
CHUNK = 512  # samples drawn at once


@dataclass(slots=True, kw_only=True)
class Noise:
    """Factors of sample times. `later_slots` is an additional factor of every visit of a pair but the first."""

    later_slots: float = 1.0

    def factors(self, rng: np.random.Generator, start: int) -> Factors:
        """Return the factors of CHUNK samples from session clock `start` on."""
        raise NotImplementedError


# --- what disturbs a clock --------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Lognormal(Noise):
    """Independent factors around a level that depends only on the session clock."""

    spread: float = 0.02
    level: Callable[[Factors], Factors | float] = lambda now: 1.0

    def factors(self, rng: np.random.Generator, start: int) -> Factors:
        now = np.arange(start, start + CHUNK, dtype=np.float64)
        return self.level(now) * np.exp(rng.normal(0, self.spread, CHUNK))


def iid() -> Noise:
    return Lognormal()


def warm_up_drift() -> Noise:
    """Return a level that is 30 % slow at first, and normal after a few hundred samples."""
    return Lognormal(level=lambda now: 1 + 0.3 * np.exp(-now / 60))


def linear_drift() -> Noise:
    return Lognormal(level=lambda now: 1 + 0.001 * now)


def period_two() -> Noise:
    """Return a level that a neighbour's timer slows at every other sample."""
    return Lognormal(spread=0.01, level=lambda now: np.where(now % 2 == 1, 1.05, 1.0))


def position_effect() -> Noise:
    """Slow the second arm of a pair by 3 %."""
    return Lognormal(spread=0.01, later_slots=1.03)


class ParetoSpikes(Noise):
    """One sample in twenty has a Pareto-distributed delay."""

    def factors(self, rng: np.random.Generator, start: int) -> Factors:
        spikes = np.where(rng.random(CHUNK) < 0.05, 1 + rng.pareto(1.5, CHUNK), 0.0)
        return np.asarray(np.exp(rng.normal(0, 0.02, CHUNK)) * (1 + spikes))


class Quantised(Noise):
    """A clock of twenty ticks: most pairs of equal arms are exact ties."""

    def factors(self, rng: np.random.Generator, start: int) -> Factors:
        return np.round(20 * np.exp(rng.normal(0, 0.02, CHUNK))) / 20


@dataclass(slots=True, kw_only=True)
class Autoregressive(Noise):
    """AR(1) with coefficient 0.95, like a neighbour on the machine."""

    level: float = 0.0

    def factors(self, rng: np.random.Generator, start: int) -> Factors:
        levels, level = [], self.level
        for shock in rng.normal(0, 0.02, CHUNK).tolist():
            level = 0.95 * level + shock
            levels.append(level)
        self.level = level
        return np.asarray(np.exp(np.array(levels)))


@dataclass(slots=True, kw_only=True)
class TwoClockStates(Noise):
    """A clock that switches between two speeds 10 % apart every 50 samples or so."""

    slow: int = 0

    def factors(self, rng: np.random.Generator, start: int) -> Factors:
        states = (self.slow + np.cumsum(rng.random(CHUNK) < 0.02)) % 2
        self.slow = int(states[-1])
        return np.where(states == 1, 1.1, 1.0) * np.exp(rng.normal(0, 0.01, CHUNK))


NOISES: Mapping[str, Callable[[], Noise]] = {
    "iid": iid,
    "warm_up_drift": warm_up_drift,
    "ar1": Autoregressive,
    "two_clock_states": TwoClockStates,
    "linear_drift": linear_drift,
    "pareto_spikes": ParetoSpikes,
    "period_two": period_two,
    "position_effect": position_effect,
    "quantised": Quantised,
}


# --- the instrument ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SimulatedBench:
    """Arms with true times (ns) under a noise, in one process; an Instrument.

    `stutters` gives the share of an arm's samples that take three times as long. `fixed_order` ignores the coin and
    visits the baseline last.
    """

    true_ns: Mapping[str, float]
    noise: Noise
    random: Random
    stutters: Mapping[str, float] = field(default_factory=dict)
    fixed_order: bool = False
    rng: np.random.Generator = field(init=False)
    ahead: list[float] = field(init=False, default_factory=list)
    now: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rng = np.random.Generator(np.random.SFC64(self.random.getrandbits(64)))

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[dict[str, list[float]], str]:
        visits = sorted(order, key=list(self.true_ns).index, reverse=True) if self.fixed_order else order
        taken: dict[str, list[float]] = {}
        for position, arm in enumerate(visits):
            factor = self.true_ns[arm] * (self.noise.later_slots if position else 1.0)
            taken[arm] = [factor * f for f in self.take(samples)]
            if arm in self.stutters:
                share = self.stutters[arm]
                taken[arm] = [t * 3 if self.random.random() < share else t for t in taken[arm]]
        return taken, ""

    def take(self, samples: int) -> list[float]:
        while len(self.ahead) < samples:
            start = self.now + len(self.ahead)
            self.ahead += self.noise.factors(self.rng, start).tolist()
        taken, self.ahead = self.ahead[:samples], self.ahead[samples:]
        self.now += samples
        return taken

    def probe(self) -> float:
        return 0.0


# --- an attempt, as the pipeline drives it ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The true speeds of a race, and its settings. `base` is the baseline.

    `session_spread`: standard deviation, in logarithms, of the bias that each arm but the baseline draws per session.
    """

    true_ns: Mapping[str, float]
    noise: Callable[[], Noise]
    plan: TrialPlan
    margin: Margin
    incumbent: str = "base"
    session_spread: float = 0.0
    stutters: Mapping[str, float] = field(default_factory=dict)
    fixed_order: bool = False

    @property
    def delta(self) -> float:
        return self.margin.delta

    @property
    def rivals(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("base", self.incumbent)))

    def bench(self, random: Random) -> SimulatedBench:
        """Return the bench of a new process."""
        lucky = self.true_ns
        if self.session_spread:
            lucky = {
                arm: ns if arm == "base" else ns * float(np.exp(random.gauss(0, self.session_spread)))
                for arm, ns in self.true_ns.items()
            }
        return SimulatedBench(lucky, self.noise(), random, self.stutters, self.fixed_order)

    def trial(self, random: Random) -> SessionRules:
        return SessionRules(plan=self.plan, delta=self.delta, seed=random.getrandbits(32))


def screened(setting: Scenario, random: Random) -> RaceSession:
    return screen(setting.bench(random), list(setting.true_ns), setting.trial(random))


def confirmed(
    setting: Scenario,
    finalists: Sequence[str],
    random: Random,
    screening: RaceSession,
    earlier: Sequence[RaceSession] = (),
) -> RaceSession:
    """Run one confirming session of the finalist, and of the one that is level with it, in a new process."""
    arms = (*setting.rivals, *finalists, *([CLONE] if CLONE in setting.true_ns else []))
    duel = Duel(arms=arms, finalist=finalists[0], rivals=setting.rivals)
    return confirm(setting.bench(random), duel, setting.trial(random), screening, earlier)


def attempt(setting: Scenario, random: Random, *, nominate: str = "") -> Race:
    """Run screening, then the finalists' confirming sessions until the first has lost or there are three.

    `nominate` names the finalist regardless of screening, the maximum effect of luck in screening. A finalist that can
    no longer be promoted is not raced to the end.
    """
    screening = screened(setting, random)
    delta = setting.delta
    found = [nominate] if nominate else leaders(screening, nominees(screening, setting.incumbent, delta))
    sessions = [screening]
    while found and len(sessions) <= SESSIONS:
        session = confirmed(setting, found, random, screening, sessions[1:])
        sessions.append(session)
        if has_lost(session, found[0], setting.rivals, delta) or not any(won(setting, session, one) for one in found):
            break
    if len(sessions) > SESSIONS:
        found = [favoured(sessions[1:], found, setting.rivals, delta)]
    return Race(
        workload=WORK,
        baseline="base",
        incumbent=setting.incumbent,
        finalist=found[0] if found else None,
        delta=setting.delta,
        alpha_session=setting.margin.alpha_session,
        pi=setting.margin.pi,
        sessions=tuple(sessions),
        time_class=setting.plan.time_class,
    )


def won(setting: Scenario, session: RaceSession, finalist: str) -> bool:
    return has_won(session, finalist, setting.rivals, setting.delta)
