"""Figures in words: four significant digits, groups separated by thin spaces, never an exponent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from autosel.certify.derive import weight_format, wrong_tokens
from autosel.certify.limits import beyond, measured
from autosel.certify.statistics import FEWEST_TO_RESAMPLE, Interval
from autosel.formats import PLAIN

if TYPE_CHECKING:
    from autosel.certify.certificate import Certificate


def figure(value: float, digits: int = 4) -> str:
    """Return `10 090`, `827.5` or `0.325`, without trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return text.rstrip("0").rstrip(".") if "." in text else text


def interval_text(found: Interval | None) -> str:
    """Return `1.82 .. 1.91`, or why there is no interval."""
    if found is None:
        return f"no interval: fewer than {FEWEST_TO_RESAMPLE}"
    return f"{found.lo:.2f} .. {found.hi:.2f}"


def percent(share: float) -> str:
    """Return `42 %`, or `<1 %` for a share that is small but not zero."""
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")


def compared(made: Certificate) -> str:
    """Return `47 of 50 tokens as the baseline's, 3 that the bound leaves open, logits at 0.40 of their bound`."""
    v = made.verification
    whose = "the baseline's" if v.against == "baseline" else "in untimed passes of PyTorch"
    told = [f"{v.tokens_equal} of {v.tokens_checked} tokens as {whose}"]
    if v.tokens_open:
        told.append(f"{v.tokens_open} that the bound leaves open")
    if wrong_tokens(made):
        told.append(f"{wrong_tokens(made)} that it does not allow")
    if v.logit_bound:
        told.append(f"logits at {v.max_logit_error / v.logit_bound:.2f} of their bound")
    return ", ".join(told)


def prompted(made: Certificate) -> str:
    """Return `text.txt, 127 tokens, sha256:0f1e..., file sha256:9a8b...`, with the first 12 digits of each digest."""
    if made.prompt is None:
        return ""
    name = "drawn at random" if not made.prompt.file_sha256 else Path(str(made.options["prompt"])).name
    each = " a sequence" if made.shape.batch > 1 else ""
    told = [name, f"{made.shape.prompt} tokens{each}", f"sha256:{made.prompt.tokens_sha256[:12]}"]
    told += [f"file sha256:{made.prompt.file_sha256[:12]}"] if made.prompt.file_sha256 else []
    return ", ".join(told)


def scored(made: Certificate) -> str:
    """Describe the scored text: perplexities of both paths and their divergence; "" if no text was scored."""
    if made.quality is None:
        return ""
    q = made.quality
    tokens = {"checkpoint": "tokens", "ids": "token ids", "bytes": "bytes (no tokenizer)"}[str(q["tokenizer"])]
    return (
        f"perplexity {q['perplexity']:.5g}, of the fp32 reference {q['reference_perplexity']:.5g}; mean divergence "
        f"{q['mean_divergence']:.2g} nats a token, largest {q['max_divergence']:.2g}; the same likeliest token at "
        f"{q['same_first']:.0%}; {q['tokens']} {tokens} of {q['text']}"
    )


def compared_format(made: Certificate) -> str:
    """Describe the format's loss against the original model; "" if none was given."""
    q = made.format_quality
    if q is None:
        return unjudged(made)
    stored = f" ({q['stored']})" if q["stored"] else ""
    told = (
        f"{weight_format(made)} against {q['original']}{stored}: perplexity {q['perplexity']:.5g} for "
        f"{q['original_perplexity']:.5g}; divergence {q['mean_divergence']:.2g} nats a token, "
        f"{q['p999_divergence']:.2g} at 99.9 %; the same likeliest token at {q['same_first']:.1%}; {q['tokens']} tokens"
    )
    over = beyond(weight_format(made), measured(q)) if q["accepted"] else ""
    return f"{told}; accepted beyond its limit: {over.replace(chr(10), '; ')}" if over else told


def unjudged(made: Certificate) -> str:
    """Return why no quality is stated, for random weights in a format; else ""."""
    coded = weight_format(made) != PLAIN and made.weights == "random"
    return "not applicable: the weights are random" if coded and made.quality is None else ""


def suspected(made: Certificate) -> str:
    """Return why the timed path cannot be right, judging by its text; "" if nothing is suspect."""
    if made.quality is None or not made.quality["suspect"]:
        return ""
    return "better than the reference beyond noise: rounding cannot improve a text, so something is counted wrongly"


def speculated(made: Certificate) -> str:
    """Describe speculation: how many tokens a step gives for the one of a plain step."""
    if not made.options.get("speculate"):
        return ""
    return (
        f"{made.options['speculate']} tokens drafted from the text so far, {made.tokens_per_step:.2f} kept a step, "
        f"each compared with plain greedy decoding{'; the baseline’s steps give one' if made.baseline else ''}"
    )
