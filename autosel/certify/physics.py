"""Faster than the memory can deliver is not fast, it is wrong: such a run is refused.

    needed rate = max(0, bytes of a step - last-level cache) / time of a step       refused above 1.1 x best read window

The cache is allowed once a step: that much may still lie in it from the step before. The window is the best of the
probes interleaved with the steps, for read rates on a shared machine move within the hour. The tenth on top is what a
window of a millisecond may fall short of the rate it measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosel.errors import AutoselError

TOLERANCE = 1.1


class ImpossibleRun(AutoselError):
    """A measured time that the device's memory cannot reach: the clock, the bytes or the work is not what it claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """One arm against the memory."""

    needed_bytes_per_s: float
    allowed_bytes_per_s: float

    @property
    def possible(self) -> bool:
        return self.needed_bytes_per_s <= self.allowed_bytes_per_s


def weigh(*, bytes_per_step: int, step_ms: float, read_bytes_per_s: float, cache_bytes: int) -> Physics:
    """What a step of `step_ms` asks of the memory, and what that can give."""
    seconds = step_ms / 1e3
    return Physics(
        needed_bytes_per_s=max(0, bytes_per_step - cache_bytes) / seconds,
        allowed_bytes_per_s=TOLERANCE * read_bytes_per_s,
    )


def refuse_impossible(name: str, physics: Physics) -> None:
    """Raises ImpossibleRun; also where no read rate was measured, for then nothing can be said."""
    if not physics.allowed_bytes_per_s:
        raise ImpossibleRun(
            f"{name}: no read rate was measured beside the run",
            why="without it nobody can tell a fast run from an impossible one; nothing was certified",
        )
    if not physics.possible:
        needed, best = physics.needed_bytes_per_s / 1e9, physics.allowed_bytes_per_s / TOLERANCE / 1e9
        raise ImpossibleRun(
            f"{name} is faster than the memory: not certified",
            why=f"it would read {needed:.3g} GB/s; the best read window beside it gave {best:.3g} GB/s",
            todo="run it again; if it stays, the clock or the byte count is wrong: report it",
        )
