"""Compare a certificate with a second run of the same plan, to find out if its figures are reproducible.

If a text was scored, it is scored again: a path that is as fast but worse is not reproduced.

Ratios are compared, because absolute times on a shared machine vary more than kernels do: the speedup, whose arms were
interleaved, and the step time against the read rate measured in the same run. Each is new / old, with an interval from
the resamples of both runs. Two equal runs differ by more than the noise within either (other pages, other neighbours):
hence the margin around 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosel.certify import model
from autosel.certify.certificate import Certificate, Prompt, another_prompt
from autosel.certify.derive import rooflines, saved, speedup, tokens_per_step
from autosel.certify.statistics import (
    FEWEST_TO_RESAMPLE,
    Interval,
    Samples,
    median,
    middle,
    resampled_medians,
    resampled_speedups,
)
from autosel.decode.run import SUSPICION, Plan
from autosel.errors import AutoselError, TooNoisy, UsageError
from autosel.values import Scalar

Outcome = Literal["reproduced", "faster", "slower", "too noisy", "another quality"]
SPEEDUP_MARGIN = 0.05  # the effect that a race must show before its noise is known (docs/method.md)
TIME_MARGIN = 0.10  # possible error of a read probe (certify.physics)
WIDEST = 0.25  # an interval that extends further from its middle decides nothing
# A path may have twice the error of the certified one, as in parity; divergence grows with the square of the error.
DIVERGENCE_MARGIN = 4.0
SAME_REFERENCE = 1e-3  # nats per token: the reference is fp32, and other threads may sum in another order


class NotReproduced(AutoselError):
    """A certified figure, or the score of its text, was not reproduced."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of both runs. `ratio` is above 1 if the second run was better."""

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
class Rescored:
    """Text of both runs: nats per token behind the reference, and divergence. `why` says what was not reproduced."""

    certified: float
    measured: float
    allowed: float  # allowed difference of the two
    certified_divergence: float
    measured_divergence: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    speedup: Compared | None  # None: without a baseline
    time: Compared  # against the read rate just before each step
    notes: tuple[str, ...]
    quality: Rescored | None = None  # if the certificate scored a text
    format: Rescored | None = None  # if it scored a format against the original

    @property
    def figures(self) -> tuple[Compared, ...]:
        """Return what was compared."""
        return (self.time,) if self.speedup is None else (self.speedup, self.time)

    @property
    def lost(self) -> str:
        """Return what of the certified scores was not reproduced, or ""."""
        return "\n".join(found.why for found in (self.quality, self.format) if found is not None and found.why)

    @property
    def outcome(self) -> Outcome:
        """Return the worst outcome of the figures; another quality is worse than all.

        An undecided figure makes the rerun undecided unless the other figure is slower.
        """
        if self.lost:
            return "another quality"
        found = tuple(figure.outcome for figure in self.figures)
        order: tuple[Outcome, ...] = ("slower", "too noisy", "faster", "reproduced")
        return next(outcome for outcome in order if outcome in found)


def refuse_other_device(certified: Certificate, hw_id: str, device: str) -> None:
    """Raise UsageError if the certificate was measured on another class of device."""
    if certified.hw_id != hw_id:
        raise UsageError(
            f"the certificate was measured on another device: {certified.device} ({certified.sm})",
            why=f"this is {device}; hw_id {hw_id[:12]}, certified {certified.hw_id[:12]}",
            todo="rerun it on a machine of that class",
        )


def refuse_other_model(certified: Certificate, plan: Plan) -> None:
    """Check the underived figures against the model that will run. Raises NotReproduced."""
    if not model.underived(certified):
        return
    trouble = model.trouble(replace(certified, architecture=model.architecture(plan.model)))
    if trouble:
        raise NotReproduced("the certified figures do not fit this model", why=trouble)


def compare(certified: Certificate, again: Certificate) -> Rerun:
    """Compare two runs. Raises UsageError if the plans differ, or if the prompt's file differs."""
    for name in ("model", "layers", "dtype", "weights", "shape", "iters", "warmup"):
        _refuse_other(name, getattr(certified, name), getattr(again, name))
    _refuse_other("options", *_asked(certified.options, again.options))
    refuse_other_prompt(certified, again.prompt)
    notes, moved = _prompt_notes(certified, again), certified.bytes_per_step
    forms = ["packed" if saved(made) else "unpacked" for made in (certified, again)]
    if forms[0] != forms[1]:  # the certified bytes over time and rate show which was slower
        notes.append(f"weights were read {forms[0]} when certified, {forms[1]} now")
    if certified.env_id != again.env_id:
        notes.append("the software differs: " + ", ".join(_differences(certified, again)))
    modes = [made.options.get("mode") for made in (certified, again)]
    if modes[0] != modes[1]:
        notes.append(f"the form of the step was {modes[0]} when certified, {modes[1]} now")
    if certified.git_sha != again.git_sha:
        notes.append(f"certified at {certified.git_sha[:12] or 'a wheel'}, now {again.git_sha[:12] or 'a wheel'}")
    if again.contended:
        notes.append("other work ran, or the device was slowed")
    return Rerun(
        speedup=_of_speedups(certified, again),
        time=_compared("roofline", _resampled(rooflines(again, moved)), _resampled(rooflines(certified)), TIME_MARGIN),
        notes=tuple(notes),
        quality=_rescored(certified.quality, again.quality),
        format=_reformatted(certified.format_quality, again.format_quality),
    )


def refuse_other_prompt(certified: Certificate, found: Prompt | None) -> None:
    """Raise UsageError for another prompt file than the certified one.

    A prompt drawn from a seed is not refused: another torch may draw other tokens, which a user cannot change.
    """
    named, held = certified.options.get("prompt"), certified.prompt
    if held is None or found is None or not held.file_sha256 or not another_prompt(held, found):
        return
    why = f"the sha256 of its tokens is {found.tokens_sha256[:12]}; certified {held.tokens_sha256[:12]}"
    if found.file_sha256 == held.file_sha256:
        why += "; the file is the same, so the tokenizer differs"
    raise UsageError(f"{named} is not the prompt that was certified", why=why, todo="restore the certified prompt file")


def _prompt_notes(certified: Certificate, again: Certificate) -> list[str]:
    """Return a note if the prompts differ or may differ."""
    if another_prompt(certified.prompt, again.prompt):
        return ["the prompt differs: this torch draws other tokens from the same seed"]
    if certified.prompt is None and again.prompt is not None and again.prompt.file_sha256:
        return ["the prompt may differ: the certificate has no digest of it"]
    return []


def refuse_other_text(certified: Certificate, sha256: str, where: str) -> None:
    """Raise UsageError unless it is the scored text."""
    stated = certified.quality or {}
    if sha256 != stated.get("text_sha256"):
        raise UsageError(
            f"{where} is not the text that was scored",
            why=f"its sha256 is {sha256[:12]}; certified {str(stated.get('text_sha256'))[:12]} ({stated.get('text')})",
            todo="name that text with --quality",
        )


def judge(found: Rerun) -> None:
    """Raise NotReproduced (exit code 3) or TooNoisy (5) unless the figure was reproduced."""
    why = "\n".join(f"{c.what}: {c.ratio:.3f} of the certified ({c.interval.lo:.3f} .. {c.interval.hi:.3f})"
                    for c in found.figures)  # fmt: skip
    if found.lost:
        raise NotReproduced("the certified quality was not reproduced", why=found.lost)
    if found.outcome == "slower":
        raise NotReproduced("the certified figure was not reproduced", why=why)
    if found.outcome == "too noisy":
        raise TooNoisy("too noisy to decide if the two runs agree", why=why, todo="run it again on a quiet machine")


def _refuse_other(name: str, old: object, new: object) -> None:
    if old != new:
        raise UsageError(f"this is another run: {name} differs", why=f"certified {old!r:.160}, now {new!r:.160}")


def _asked(old: Mapping[str, Scalar], new: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return both without the form of the step, which a decision chooses, not the plan.

    Older certificates have the requested form only in their command, which is what ran again.
    """
    left_out = {"mode", "saved_bytes", *({"step", "layout"} - set(old))}
    certified, again = ({k: v for k, v in stated.items() if k not in left_out} for stated in (old, new))
    return certified, again


def _rescored(old: Mapping[str, Scalar] | None, new: Mapping[str, Scalar] | None) -> Rescored | None:
    """Compare the scores of the text. Raises UsageError if the certified text was not scored again."""
    if old is None:
        return None
    if new is None or any(old[n] != new[n] for n in ("text_sha256", "tokenizer", "tokens")):
        raise UsageError("the certified text was not scored again", todo="name it with --quality")
    return _scores(old, new, "reference")


def _reformatted(old: Mapping[str, Scalar] | None, new: Mapping[str, Scalar] | None) -> Rescored | None:
    """Compare the scores against the original. Raises UsageError if it was not compared with the format again."""
    if old is None:
        return None
    if new is None or old["tokens"] != new["tokens"]:
        raise UsageError(
            "the certified format was not compared with its original again",
            why=f"the original was {old['original']}",
            todo="restore it there",
        )
    return _scores(old, new, "original")


def _scores(old: Mapping[str, Scalar], new: Mapping[str, Scalar], than: Literal["reference", "original"]) -> Rescored:
    behind = [float(q["difference"]) for q in (old, new)]
    divergence = [float(q["mean_divergence"]) for q in (old, new)]
    allowed = SUSPICION * math.hypot(float(old["difference_error"]), float(new["difference_error"]))
    reference = [math.log(float(q[f"{than}_perplexity"])) for q in (old, new)]
    why = ""
    if abs(reference[0] - reference[1]) > SAME_REFERENCE:
        why = f"the {than} itself gives {reference[1]:.4f} nats a token, certified {reference[0]:.4f}: other weights"
    elif behind[1] - behind[0] > allowed:
        why = f"{behind[1]:+.4g} nats a token to the {than}, certified {behind[0]:+.4g}, {allowed:.2g} apart allowed"
    elif divergence[1] > DIVERGENCE_MARGIN * divergence[0]:
        why = f"divergence {divergence[1]:.3g} nats, certified {divergence[0]:.3g}: more than {DIVERGENCE_MARGIN:g}x"
    return Rescored(
        certified=behind[0],
        measured=behind[1],
        allowed=allowed,
        certified_divergence=divergence[0],
        measured_divergence=divergence[1],
        why=why,
    )


def _of_speedups(certified: Certificate, again: Certificate) -> Compared | None:
    """Compare the speedups; None without a baseline, which both plans have or lack."""
    old, new = speedup(certified), speedup(again)
    if old is None or new is None:
        return None
    return _compared("speedup", (new, _speedups(again)), (old, _speedups(certified)), SPEEDUP_MARGIN)


def _speedups(made: Certificate) -> Samples:
    s = made.samples
    kept = s.kept or (tokens_per_step(made),) * made.iters
    if made.iters < FEWEST_TO_RESAMPLE:
        import numpy as np

        slow, fast, tokens = (np.asarray(v, dtype=np.float64) for v in (s.baseline_ns, s.optimised_ns, kept))
        return slow / fast * tokens
    return resampled_speedups(s.baseline_ns, s.optimised_ns, kept)


def _resampled(values: Sequence[float]) -> tuple[float, Samples]:
    """Return the median of the values, and the median of each resample; for fewer than eight, the values themselves."""
    if len(values) < FEWEST_TO_RESAMPLE:
        import numpy as np

        return median(values), np.asarray(values, dtype=np.float64)
    return median(values), resampled_medians(values)[0]


def _compared(what: str, new: tuple[float, Samples], old: tuple[float, Samples], margin: float) -> Compared:
    """Compare one figure. Each run has the figure as certified, and its resamples, which give the interval."""
    (measured, again), (certified, before) = new, old
    size = min(len(again), len(before))
    ratios = again[:size] / before[:size][::-1]  # reversed, so that equal picks of the two runs are independent
    return Compared(
        what=what,
        certified=certified,
        measured=measured,
        ratio=measured / certified,
        interval=middle(ratios),
        margin=margin,
    )


def _differences(a: Certificate, b: Certificate) -> list[str]:
    names = sorted(set(a.environment) | set(b.environment))
    return [
        f"{n} {a.environment.get(n)!s:.40} -> {b.environment.get(n)!s:.40}"
        for n in names
        if a.environment.get(n) != b.environment.get(n)
    ]
