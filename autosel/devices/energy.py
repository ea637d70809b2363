"""Energy of the optimised steps, if the machine measures it: RAPL for CPU packages, NVML for a GPU's board.

The figures include everything that runs there. RAPL updates every millisecond: a meter is read right before and right
after each optimised step, outside the timed region, and the differences are summed; baseline steps run between them. A
board's counter updates every 20 to 100 ms (Yang et al., "Part-time Power Measurements", SC 2024), too seldom for a
single step: it is read over two seconds of consecutive optimised steps after the timed ones, from one update to
another. Status of the GPU's half: not yet run on silicon.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autosel.errors import UsageError

RAPL = Path("/sys/class/powercap")
PACKAGE = re.compile(
    r"package-\d+"
)  # parts (core, uncore, dram) have their own domains, which may be included in the package
SPAN_NS = 2_000_000_000
PATIENCE_NS = 1_000_000_000  # ten updates of the slowest counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A counter that increases and wraps after `most`; 0 means it does not wrap."""

    read: Callable[[], int]  # microjoules
    most: int

    def joules(self, before: int, after: int) -> float:
        again = self.most + 1 if after < before and self.most else 0
        return (after - before + again) / 1e6


class Meter:
    """Sum of the counters' increases between `begin` and `end`.

    If a counter cannot be read, the energy is unknown and `why` gives the reason. `told` is a remark on the figure.
    """

    def __init__(self, counters: tuple[Counter, ...], why: str = "") -> None:
        self.counters, self.why = counters, why
        self.total, self.before, self.told = 0.0, (0,) * len(counters), ""

    @property
    def joules(self) -> float | None:
        return None if self.why or not self.total > 0 else self.total

    def begin(self) -> None:
        self.before = self._read()

    def end(self) -> None:
        after = self._read()
        if not self.why:
            self.total += sum(c.joules(a, b) for c, a, b in zip(self.counters, self.before, after, strict=True))

    def after(self, step: Callable[[], object], steps: int) -> None:
        """Measure after the `steps` timed steps, if the meter needs it. `step` runs one more like them."""

    def _read(self) -> tuple[int, ...]:
        if self.why:
            return self.before
        try:
            return tuple(counter.read() for counter in self.counters)
        except (OSError, ValueError) as error:
            self.why = f"energy is unknown: {error}"
            return self.before


class BoardMeter(Meter):
    """Meter of a GPU's board, which measures after the timed steps. `read` returns millijoules."""

    def __init__(self, read: Callable[[], int], clock: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__(())
        self.read, self.clock = read, clock

    def after(self, step: Callable[[], object], steps: int) -> None:
        try:
            self._to_advance(step)
            first, began, taken = self.read(), self.clock(), 0
            while self.clock() - began < SPAN_NS:
                step()
                taken += 1
            taken += self._to_advance(step)
            self.total = (self.read() - first) / 1e3 / taken * steps
        except (OSError, ValueError) as error:
            self.why = f"energy is unknown: {error}"
            return
        self.told = f"energy: the board's, by NVML, over {taken} more steps in a row"

    def _to_advance(self, step: Callable[[], object]) -> int:
        """Run steps until the counter advances, and return their number. Raises ValueError if it does not advance."""
        counted, began, taken = self.read(), self.clock(), 0
        while self.read() == counted:
            if self.clock() - began > PATIENCE_NS:
                raise ValueError("the board's counter (NVML) does not advance")
            step()
            taken += 1
        return taken


def packages(root: Path = RAPL) -> Meter:
    """Return a meter of the CPU packages; if there is none, a meter that says why."""
    folders = _packages(root)
    if not folders:
        return Meter((), f"energy is unknown: {root} has no intel-rapl package domain")
    made = Meter(tuple(_counter(folder) for folder in folders))
    made.begin()  # reports an unreadable counter before anything is measured
    return made


def board(counter: Callable[[], Callable[[], int]]) -> Meter:
    """Return a meter of a board, from a function that finds its counter; if there is none, a meter that says why."""
    try:
        read = counter()
        read()
    except (OSError, UsageError) as error:
        return Meter((), f"energy is unknown: {error}")
    return BoardMeter(read)


def _packages(root: Path) -> list[Path]:
    """Return folders of whole packages: `intel-rapl:0`, not its parts `intel-rapl:0:0` or a duplicate with `-mmio`."""
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            if PACKAGE.fullmatch((folder / "name").read_text().strip()):
                found.append(folder)
        except OSError:
            continue
    return found


def _counter(folder: Path) -> Counter:
    try:
        most = int((folder / "max_energy_range_uj").read_text())
    except (OSError, ValueError):
        most = 0
    return Counter(read=lambda: int((folder / "energy_uj").read_text()), most=most)
