"""Refuse runs that are faster than the memory can deliver: such a measurement is wrong.

    needed rate = max(0, bytes of a step - last-level cache) / time of a step       refused above 1.1 x best read window

The size of the cache is subtracted once a step, because it may still hold data of the step before. The read window is
the best of the probes interleaved with the steps, because read rates of a shared machine change within the hour. The
factor 1.1 covers a window of a millisecond that falls short of the true rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosel.errors import AutoselError

TOLERANCE = 1.1


class ImpossibleRun(AutoselError):
    """A measured time that the device's memory cannot reach: the clock, the bytes or the work is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """Needed and allowed memory rate of one arm."""

    needed_bytes_per_s: float
    allowed_bytes_per_s: float

    @property
    def possible(self) -> bool:
        return self.needed_bytes_per_s <= self.allowed_bytes_per_s


def weigh(*, bytes_per_step: int, step_ms: float, read_bytes_per_s: float, cache_bytes: int) -> Physics:
    """Return the rate that a step of `step_ms` needs from memory, and the rate that memory can give."""
    seconds = step_ms / 1e3
    return Physics(
        needed_bytes_per_s=max(0, bytes_per_step - cache_bytes) / seconds,
        allowed_bytes_per_s=TOLERANCE * read_bytes_per_s,
    )


def refuse_impossible(name: str, physics: Physics) -> None:
    """Raise ImpossibleRun; also if no read rate was measured, because then nothing can be checked."""
    if not physics.allowed_bytes_per_s:
        raise ImpossibleRun(
            f"{name}: no read rate was measured during the run",
            why="without it, an impossible run cannot be detected; nothing was certified",
        )
    if not physics.possible:
        needed, best = physics.needed_bytes_per_s / 1e9, physics.allowed_bytes_per_s / TOLERANCE / 1e9
        raise ImpossibleRun(
            f"{name} is faster than the memory: not certified",
            why=f"it would read {needed:.3g} GB/s; the best read window of the run gave {best:.3g} GB/s",
            todo="run it again; if it fails again, the clock or the byte count is wrong: report it",
        )
