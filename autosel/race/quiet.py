"""Waits until other processes leave the machine alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autosel.devices.cpu import neighbours
from autosel.devices.cpu.neighbours import Reading
from autosel.values import CONTENDED_CORES

LOOK_S = 1.0  # a look at the machine; one quiet look ends the wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """Wait for a quiet machine, until `deadline` (on `clock`). `tell` gets the processes that keep it busy."""

    tell: Callable[[str], None]
    deadline: float = float("inf")
    clock: Callable[[], float] = time.monotonic
    look: Callable[[], Reading] = neighbours.read
    rest: Callable[[float], None] = time.sleep

    def wait(self) -> None:
        before = self.look()
        while self.clock() < self.deadline:
            self.rest(LOOK_S)
            now = self.look()
            found = neighbours.between(before, now)
            if found.cores <= CONTENDED_CORES:
                return
            self.tell(found.text)
            before = now
