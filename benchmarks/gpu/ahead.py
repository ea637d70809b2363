"""Units of a stage that measures no times, begun before they are asked for: several side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.gpu.stages import Found

MOST = 4  # at once: each has a context on the device, its operands there, and references on the host


class Ahead:
    """Begun in their order from the moment it is made. Not ended: the process that has it is."""

    def __init__(self, units: Sequence[str], run: Callable[[str], Found], *, threads: int) -> None:
        self.run = run
        self.executor = ThreadPoolExecutor(max_workers=threads)
        self.found: dict[str, Future[Found]] = {unit: self.executor.submit(self._timed, unit) for unit in units}

    def of(self, unit: str) -> Found:
        """Raises what the unit raised."""
        return self.found[unit].result()

    def _timed(self, unit: str) -> Found:
        started = time.monotonic()
        found = self.run(unit)
        return {"seconds": round(time.monotonic() - started, 2), **found}


def side_by_side() -> int:
    """How many such units: they share cores with what they start and with compilers."""
    from autosel.tuning.builds import at_once

    return max(2, min(MOST, at_once() // 4))
