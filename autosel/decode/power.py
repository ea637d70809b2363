"""What energy the optimised steps took, where the machine tells: a CPU's packages, by RAPL (all that runs on them).

A meter is read right before and right after each optimised step, outside what is timed, and the differences are added
up: the baseline's steps lie between them. RAPL counts anew every millisecond; a GPU's counter in NVML does so too
seldom to tell a step from its neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RAPL = Path("/sys/class/powercap")
PACKAGE = re.compile(
    r"package-\d+"
)  # its parts (core, uncore, dram) are domains of their own, and counted in it or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """One that goes up and, past `most`, begins again; 0: it does not."""

    read: Callable[[], int]  # microjoules
    most: int

    def joules(self, before: int, after: int) -> float:
        again = self.most + 1 if after < before and self.most else 0
        return (after - before + again) / 1e6


class Meter:
    """Adds up what its counters count between `begin` and `end`. Once one cannot be read, nothing is known: `why`."""

    def __init__(self, counters: tuple[Counter, ...], why: str = "") -> None:
        self.counters, self.why = counters, why
        self.total, self.before = 0.0, (0,) * len(counters)

    @property
    def joules(self) -> float | None:
        return None if self.why or not self.total > 0 else self.total

    def begin(self) -> None:
        self.before = self._read()

    def end(self) -> None:
        after = self._read()
        if not self.why:
            self.total += sum(c.joules(a, b) for c, a, b in zip(self.counters, self.before, after, strict=True))

    def _read(self) -> tuple[int, ...]:
        if self.why:
            return self.before
        try:
            return tuple(counter.read() for counter in self.counters)
        except (OSError, ValueError) as error:
            self.why = f"energy is not known: {error}"
            return self.before


def meter(device: str, root: Path = RAPL) -> Meter:
    """What the device can be metered by; where there is nothing, one that says why."""
    if device != "cpu":
        return Meter((), "energy is not known: NVML counts it too seldom to tell both arms' steps apart")
    packages = _packages(root)
    if not packages:
        return Meter((), f"energy is not known: {root} has no intel-rapl package domain")
    made = Meter(tuple(_counter(folder) for folder in packages))
    made.begin()  # what may not be read is said before anything is measured
    return made


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
