"""Times by the host's clock."""

from __future__ import annotations

from collections.abc import Callable
from time import (
    perf_counter_ns as clock_ns,
)  # bound before any candidate is loaded, so that patching `time` has no effect
from typing import Any

from autosel.devices.device import CallArgs, Drawn, Outputs


class InARow:
    """Calls on consecutive copies, between two readings of the clock."""

    def __init__(
        self, call: Callable[..., Any], calls: CallArgs, turn: Callable[[int], range], outputs: Outputs
    ) -> None:
        self.call, self.turn = call, turn
        self.by_slot = [[(*arguments, *own) for arguments in calls] for own in outputs]
        self.calls = self.by_slot[0]
        self.result: Any = None
        self.slot = 0
        self.kept: list[Any] = []

    def sample(self, calls: int, drawn: Drawn | None = None) -> float:
        slots = drawn.slots if drawn is not None else (0,) * calls
        copies, turns = len(self.calls), self.turn(calls)
        visits = [(self.by_slot[slot][i % copies], slot) for i, slot in zip(turns, slots, strict=True)]
        call = self.call
        results: list[Any] = [None] * len(self.by_slot)
        start = clock_ns()
        for arguments, slot in visits:
            results[slot] = call(*arguments)
        elapsed = clock_ns() - start
        self.slot = slots[-1]
        self.result = results[self.slot]
        self.kept = [results[slot] for slot in drawn.kept] if drawn is not None else []
        return elapsed / calls
