"""Does a certificate's figure come out again? A second run of the same plan, compared statistically.

What is compared are ratios, for absolute times of a shared machine move by more than any kernel does: the speedup,
whose arms were interleaved, and the step time against the read rate measured beside it. Each is new / old with the
interval that both runs' resamples give. Two runs of the same thing differ by more than the noise within either (other
pages, other neighbours): hence the margin around 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from autosel.certify.certificate import Certificate
from autosel.certify.statistics import FEWEST_TO_RESAMPLE, Figures, Interval, median, middle, resampled_medians
from autosel.errors import AutoselError, TooNoisy, UsageError

Outcome = Literal["reproduced", "faster", "slower", "too noisy"]
SPEEDUP_MARGIN = 0.05  # the effect that a race must show before its noise is known (docs/method.md)
TIME_MARGIN = 0.10  # what a read probe may be off (certify.physics)
WIDEST = 0.25  # an interval that reaches further from its middle says nothing


class NotReproduced(AutoselError):
    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of both runs. `ratio` is above 1 where the second run did better."""

    what: str
    certified: float
    measured: float
    ratio: float
    interval: Interval
    margin: float

    @property
    def outcome(self) -> Outcome:
        if max(self.interval.hi / self.ratio, self.ratio / self.interval.lo) > 1 + WIDEST:
            return "too noisy"
        if self.interval.lo > 1 + self.margin:
            return "faster"
        return "slower" if self.interval.hi < 1 - self.margin else "reproduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    speedup: Compared
    time: Compared  # step time x read rate: bytes the memory could have delivered meanwhile
    notes: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        """The worse of both; an undecided one decides nothing unless the other is slower."""
        found = (self.speedup.outcome, self.time.outcome)
        order: tuple[Outcome, ...] = ("slower", "too noisy", "faster", "reproduced")
        return next(outcome for outcome in order if outcome in found)


def refuse_other_device(certified: Certificate, hw_id: str, device: str) -> None:
    """Raises UsageError: a figure of another device class cannot come out here."""
    if certified.hw_id != hw_id:
        raise UsageError(
            f"the certificate was measured on another device: {certified.device} ({certified.sm})",
            why=f"this is {device}; hw_id {hw_id[:12]}, certified {certified.hw_id[:12]}",
            todo="rerun it on a machine of that class",
        )


def compare(certified: Certificate, again: Certificate) -> Rerun:
    """Raises UsageError where the two are not the same plan."""
    _refuse_other_plan(certified, again)
    old, new = _medians(certified), _medians(again)
    notes = []
    if certified.env_id != again.env_id:
        notes.append("the software differs: " + ", ".join(_differences(certified, again)))
    if certified.git_sha != again.git_sha:
        notes.append(f"certified at {certified.git_sha[:12] or 'a wheel'}, now {again.git_sha[:12] or 'a wheel'}")
    if again.contended:
        notes.append("other work ran on this machine")
    return Rerun(
        speedup=_compared("speedup", new[1] / new[0], old[1] / old[0], SPEEDUP_MARGIN),
        time=_compared(
            "roofline",
            again.bytes_per_step / again.read_bytes_per_s / new[0] * 1e9,
            certified.bytes_per_step / certified.read_bytes_per_s / old[0] * 1e9,
            TIME_MARGIN,
        ),
        notes=tuple(notes),
    )


def judge(found: Rerun) -> None:
    """Raises NotReproduced (exit code 3) or TooNoisy (5)."""
    why = "\n".join(f"{c.what}: {c.ratio:.3f} of the certified ({c.interval.lo:.3f} .. {c.interval.hi:.3f})"
                    for c in (found.speedup, found.time))  # fmt: skip
    if found.outcome == "slower":
        raise NotReproduced("the certified figure did not come out again", why=why)
    if found.outcome == "too noisy":
        raise TooNoisy("the two runs cannot be told apart or together", why=why, todo="run it again on a quiet machine")


def _refuse_other_plan(certified: Certificate, again: Certificate) -> None:
    for name in ("model", "layers", "dtype", "weights", "shape", "options", "iters", "warmup"):
        if getattr(certified, name) != getattr(again, name):
            raise UsageError(
                f"this is another run: {name} differs",
                why=f"certified {getattr(certified, name)!r:.160}, now {getattr(again, name)!r:.160}",
            )


def _medians(made: Certificate) -> list[Figures]:
    """(optimised, baseline) medians, ns, in each resample; of a handful of steps, every step."""
    s = made.samples
    if made.iters < FEWEST_TO_RESAMPLE:
        return [np.asarray(arm, dtype=np.float64) for arm in (s.optimised_ns, s.baseline_ns)]
    return resampled_medians(s.optimised_ns, s.baseline_ns)


def _compared(what: str, new: Figures, old: Figures, margin: float) -> Compared:
    size = min(len(new), len(old))
    ratios = new[:size] / old[:size][::-1]  # reversed: equal picks of two runs have nothing in common
    measured, certified = median(new.tolist()), median(old.tolist())
    interval = middle(ratios)
    return Compared(
        what=what,
        certified=certified,
        measured=measured,
        ratio=measured / certified,
        interval=interval,
        margin=margin,
    )


def _differences(a: Certificate, b: Certificate) -> list[str]:
    names = sorted(set(a.environment) | set(b.environment))
    return [
        f"{n} {a.environment.get(n)!s:.40} -> {b.environment.get(n)!s:.40}"
        for n in names
        if a.environment.get(n) != b.environment.get(n)
    ]
