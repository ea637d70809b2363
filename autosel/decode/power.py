"""What energy the optimised steps took, where the machine tells: a CPU's packages by RAPL, a GPU's board by NVML, with
all that runs on them.

RAPL counts anew every millisecond: a meter is read right before and right after each optimised step, outside what is
timed, and the differences are added up; the baseline's steps lie between them. A board's counter advances every 20 to
100 ms (Yang et al., "Part-time Power Measurements", SC 2024), too seldom to tell a step from its neighbour: it is read
over two seconds of optimised steps in a row after the timed ones, from one of its advances to another.
Status of the GPU's half: not yet run on silicon.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autosel import fingerprint
from autosel.errors import UsageError
from autosel.fingerprint import nvml

RAPL = Path("/sys/class/powercap")
PACKAGE = re.compile(
    r"package-\d+"
)  # its parts (core, uncore, dram) are domains of their own, and counted in it or not
SPAN_NS = 2_000_000_000
PATIENCE_NS = 1_000_000_000  # ten of the slowest counter's advances


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """One that goes up and, past `most`, begins again; 0: it does not."""

    read: Callable[[], int]  # microjoules
    most: int

    def joules(self, before: int, after: int) -> float:
        again = self.most + 1 if after < before and self.most else 0
        return (after - before + again) / 1e6


class Meter:
    """Adds up what its counters count between `begin` and `end`. Once one cannot be read, nothing is known: `why`.
    What else is to be said of the figure: `told`."""

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
        """Once `steps` were timed. `step` takes one more that is like them."""

    def _read(self) -> tuple[int, ...]:
        if self.why:
            return self.before
        try:
            return tuple(counter.read() for counter in self.counters)
        except (OSError, ValueError) as error:
            self.why = f"energy is not known: {error}"
            return self.before


class BoardMeter(Meter):
    """A GPU's: asked afterwards. `read` gives millijoules."""

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
            self.why = f"energy is not known: {error}"
            return
        self.told = f"energy: the board's, by NVML, over {taken} more steps in a row"

    def _to_advance(self, step: Callable[[], object]) -> int:
        """Steps until the counter advances. Raises ValueError if it does not."""
        counted, began, taken = self.read(), self.clock(), 0
        while self.read() == counted:
            if self.clock() - began > PATIENCE_NS:
                raise ValueError("the board's counter (NVML) stands still")
            step()
            taken += 1
        return taken


def meter(device: str, root: Path = RAPL) -> Meter:
    """What the device can be metered by; where there is nothing, one that says why."""
    if device != "cpu":
        return _board(device)
    packages = _packages(root)
    if not packages:
        return Meter((), f"energy is not known: {root} has no intel-rapl package domain")
    made = Meter(tuple(_counter(folder) for folder in packages))
    made.begin()  # what may not be read is said before anything is measured
    return made


def _board(device: str) -> Meter:
    try:
        read = nvml.energy_counter(fingerprint.unit(device))
        read()
    except (OSError, UsageError) as error:
        return Meter((), f"energy is not known: {error}")
    return BoardMeter(read)


def _packages(root: Path) -> list[Path]:
    """Folders of whole packages: `intel-rapl:0`, not its parts `intel-rapl:0:0`, nor the same again by `-mmio`."""
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
