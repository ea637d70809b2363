"""Time single calls as a program makes them: after an op of PyTorch that used all threads, and after rests.

A loop of calls of one kernel keeps the pool's threads awake and its code in cache. A program calls other ops in
between, and waits. Only short calls are timed this way (`plan`): waking a pool takes about 100 us, which is little
compared with a call of milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import torch

WIDTH = 2048  # of the square product that runs first: 8 MB of bf16, all threads for about 100 us
REST_SHORT_S, REST_LONG_S = 0.001, 0.02  # within and beyond the 8 ms for which OpenMP's threads spin


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The work before a call, and the number of turns of a session in which each arm is called once."""

    ahead: Callable[[], Any]
    turns: int


def _product() -> torch.Tensor:
    x, w = _factors()
    return torch.nn.functional.linear(x, w)


@cache
def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, WIDTH, dtype=torch.bfloat16), torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)


SITUATIONS: Mapping[str, Situation] = {
    "after an op of PyTorch": Situation(ahead=_product, turns=8),
    "after 1 ms of rest": Situation(ahead=partial(time.sleep, REST_SHORT_S), turns=4),
    "after 20 ms of rest": Situation(ahead=partial(time.sleep, REST_LONG_S), turns=3),  # 9 in 3 sessions can cross E
}


def turns(arms: Sequence[str], rng: Random) -> list[tuple[str, list[str]]]:
    """Return (a situation, the arms in the order of their calls) for each turn of a session."""
    found = [(name, list(arms)) for name, situation in SITUATIONS.items() for _ in range(situation.turns)]
    for _, order in found:
        rng.shuffle(order)
    return found
