"""Synthetic candidates with a known truth, on which the very rules that judge real kernels are judged.

A `Noise` turns the true time of a call at a moment into an observed one. `Bench` is an `Instrument`: it keeps its own
clock, so drift, clock states and interference depend on when and in which position an arm is visited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

Noise = Callable[[Random, float, int], float]  # (random source, session clock in samples, position in pair) -> factor


def iid(spread: float = 0.02) -> Noise:
    return lambda random, now, position: math.exp(random.gauss(0, spread))


def warm_up_drift(random: Random, now: float, position: int) -> float:
    return (1 + 0.3 * math.exp(-now / 60)) * math.exp(random.gauss(0, 0.02))


def linear_drift(random: Random, now: float, position: int) -> float:
    return (1 + 0.001 * now) * math.exp(random.gauss(0, 0.02))


def pareto_spikes(random: Random, now: float, position: int) -> float:
    spike = random.paretovariate(1.5) if random.random() < 0.05 else 0.0
    return math.exp(random.gauss(0, 0.02)) * (1 + spike)


def period_two(random: Random, now: float, position: int) -> float:
    return (1.05 if int(now) % 2 else 1.0) * math.exp(random.gauss(0, 0.01))


def second_slot_slower(random: Random, now: float, position: int) -> float:
    return (1.03 if position else 1.0) * math.exp(random.gauss(0, 0.01))


def quantised(random: Random, now: float, position: int) -> float:
    return round(20 * math.exp(random.gauss(0, 0.02))) / 20


class Autoregressive:
    """AR(1) with coefficient 0.95: what a neighbour on the machine looks like."""

    def __init__(self) -> None:
        self.level = 0.0

    def __call__(self, random: Random, now: float, position: int) -> float:
        self.level = 0.95 * self.level + random.gauss(0, 0.02)
        return math.exp(self.level)


class TwoClockStates:
    """A clock that switches between two speeds 10 % apart every 50 samples or so."""

    def __init__(self) -> None:
        self.slow = False

    def __call__(self, random: Random, now: float, position: int) -> float:
        if random.random() < 0.02:
            self.slow = not self.slow
        return (1.1 if self.slow else 1.0) * math.exp(random.gauss(0, 0.01))


NOISES: Mapping[str, Callable[[], Noise]] = {
    "iid": iid,
    "warm_up_drift": lambda: warm_up_drift,
    "ar1": Autoregressive,
    "two_clock_states": TwoClockStates,
    "linear_drift": lambda: linear_drift,
    "pareto_spikes": lambda: pareto_spikes,
    "period_two": lambda: period_two,
    "position_effect": lambda: second_slot_slower,
    "quantised": lambda: quantised,
}


@dataclass(slots=True)
class Bench:
    """Arms with true times (ns) under a noise; an Instrument."""

    true_ns: Mapping[str, float]
    noise: Noise
    random: Random
    now: float = 0.0

    def pair(self, order: Sequence[str], calls: int, samples: int) -> tuple[dict[str, list[float]], str]:
        taken: dict[str, list[float]] = {}
        for position, arm in enumerate(order):
            taken[arm] = []
            for _ in range(samples):
                taken[arm].append(self.true_ns[arm] * self.noise(self.random, self.now, position))
                self.now += 1
        return taken, ""

    def probe(self) -> float:
        return 0.0
