"""Time a program's own code and decided kernels in turn, where both run, and keep the faster one.

A decision proves that a kernel is faster than PyTorch's own. An engine may have a better kernel, on weights that it
packed when it loaded them. So the two run in turn in the engine's first steps, on the weights of different layers,
which come from memory as they do later; a coin decides which one is next. Afterwards the one with the lower median runs
alone. A patched model's decode steps are compared with the model's own in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property
from random import Random
from typing import Any

TIMED = 24  # calls of each


class ServingTrial:
    """One comparison, for one key of a program's calls. `settling`: calls of the decided kernel before it, untimed: in
    them its weights are prepared, and the guard checks every result."""

    def __init__(self, settling: int) -> None:
        self.settling = settling
        self.decided_ns: list[int] = []
        self.own_ns: list[int] = []
        self.coin = Random(settling)

    @property
    def over(self) -> bool:
        return len(self.decided_ns) >= TIMED and len(self.own_ns) >= TIMED

    @cached_property
    def pays(self) -> bool:
        """Return True if the decided kernel was at least as fast as the program's own code, once the trial is over."""
        assert self.over, "later calls would change the answer"
        return self._median(self.decided_ns) <= self._median(self.own_ns)

    @property
    def told(self) -> str:
        return f"{self._median(self.decided_ns) / 1e3:.0f} us, its own {self._median(self.own_ns) / 1e3:.0f} us"

    def __call__(self, decided: Callable[[], Any], own: Callable[[], Any]) -> tuple[Any, bool]:
        """Run one of the two; return its result, and whether the decided kernel made it. A result of None from
        `decided` means that it failed: the program's own code runs, untimed."""
        if self.settling > 0:
            self.settling -= 1
            return self._made(decided(), own)
        mine = self._next()
        began = time.perf_counter_ns()
        made = decided() if mine else own()
        (self.decided_ns if mine else self.own_ns).append(time.perf_counter_ns() - began)
        return self._made(made, own) if mine else (made, False)

    def _next(self) -> bool:
        left = TIMED - len(self.decided_ns), TIMED - len(self.own_ns)
        return left[0] > 0 and (left[1] <= 0 or self.coin.random() * sum(left) < left[0])

    @staticmethod
    def _made(made: Any, own: Callable[[], Any]) -> tuple[Any, bool]:
        return (own(), False) if made is None else (made, True)

    @staticmethod
    def _median(times: list[int]) -> float:
        return statistics.median(times)
