"""Does a certificate's figure come out again? A second run of the same plan, compared statistically.

What is compared are ratios, for absolute times of a shared machine move by more than any kernel does: the speedup,
whose arms were interleaved, and the step time against the read rate measured beside it. Each is new / old with the
interval that both runs' resamples give. Two runs of the same thing differ by more than the noise within either (other
pages, other neighbours): hence the margin around 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autosel.certify.certificate import Certificate
from autosel.certify.derive import rooflines
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
    time: Compared  # against the read rate just before each step
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
    old, new = _speedups(certified), _speedups(again)
    notes = []
    if certified.env_id != again.env_id:
        notes.append("the software differs: " + ", ".join(_differences(certified, again)))
    if certified.git_sha != again.git_sha:
        notes.append(f"certified at {certified.git_sha[:12] or 'a wheel'}, now {again.git_sha[:12] or 'a wheel'}")
    if again.contended:
        notes.append("other work ran on this machine")
    return Rerun(
        speedup=_compared("speedup", new, old, SPEEDUP_MARGIN),
        time=_compared("roofline", _medians(rooflines(again)), _medians(rooflines(certified)), TIME_MARGIN),
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


def _speedups(made: Certificate) -> Figures:
    s = made.samples
    if made.iters < FEWEST_TO_RESAMPLE:
        return np.asarray(s.baseline_ns, dtype=np.float64) / np.asarray(s.optimised_ns, dtype=np.float64)
    slow, fast = resampled_medians(s.baseline_ns, s.optimised_ns)
    return slow / fast


def _medians(values: Sequence[float]) -> Figures:
    """The median in each resample; of a handful, the values themselves."""
    if len(values) < FEWEST_TO_RESAMPLE:
        return np.asarray(values, dtype=np.float64)
    return resampled_medians(values)[0]


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
