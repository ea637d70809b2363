"""Figures as people write them: four significant digits, thin groups, never an exponent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from autosel.certify.derive import wrong_tokens
from autosel.certify.statistics import FEWEST_TO_RESAMPLE, Interval

if TYPE_CHECKING:
    from autosel.certify.certificate import Certificate


def figure(value: float, digits: int = 4) -> str:
    """`10 090`, `827.5`, `0.325`; zeros behind the point are left out."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return text.rstrip("0").rstrip(".") if "." in text else text


def interval_text(found: Interval | None) -> str:
    """`1.82 .. 1.91`, or why there is none."""
    if found is None:
        return f"no interval: fewer than {FEWEST_TO_RESAMPLE}"
    return f"{found.lo:.2f} .. {found.hi:.2f}"


def percent(share: float) -> str:
    """`42 %`; `<1 %` for what is there and small."""
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")


def compared(made: Certificate) -> str:
    """`47 of 50 tokens as the baseline's, 3 that the bound leaves open, logits at 0.40 of their bound`."""
    v = made.verification
    told = [f"{v.tokens_equal} of {v.tokens_checked} tokens as the baseline's"]
    if v.tokens_open:
        told.append(f"{v.tokens_open} that the bound leaves open")
    if wrong_tokens(made):
        told.append(f"{wrong_tokens(made)} that it does not allow")
    if v.logit_bound:
        told.append(f"logits at {v.max_logit_error / v.logit_bound:.2f} of their bound")
    return ", ".join(told)


def prompted(made: Certificate) -> str:
    """`text.txt, 127 tokens, sha256:0f1e..., file sha256:9a8b...`: enough of each digest to tell prompts apart."""
    if made.prompt is None:
        return ""
    name = "drawn at random" if not made.prompt.file_sha256 else Path(str(made.options["prompt"])).name
    each = " a sequence" if made.shape.batch > 1 else ""
    told = [name, f"{made.shape.prompt} tokens{each}", f"sha256:{made.prompt.tokens_sha256[:12]}"]
    told += [f"file sha256:{made.prompt.file_sha256[:12]}"] if made.prompt.file_sha256 else []
    return ", ".join(told)


def scored(made: Certificate) -> str:
    """Of a text: what both paths made of it and how far apart they are; empty where none was scored."""
    if made.quality is None:
        return ""
    q = made.quality
    tokens = {"checkpoint": "tokens", "ids": "token ids", "bytes": "bytes (no tokenizer)"}[str(q["tokenizer"])]
    return (
        f"perplexity {q['perplexity']:.5g}, of the fp32 reference {q['reference_perplexity']:.5g}; mean divergence "
        f"{q['mean_divergence']:.2g} nats a token, largest {q['max_divergence']:.2g}; the same likeliest token at "
        f"{q['same_first']:.0%}; {q['tokens']} {tokens} of {q['text']}"
    )


def suspected(made: Certificate) -> str:
    """Why the path that was timed cannot be right, where its text says so."""
    if made.quality is None or not made.quality["suspect"]:
        return ""
    return "better than the reference beyond noise: rounding cannot know a text, so something is counted wrongly"


def speculated(made: Certificate) -> str:
    """Of a step of speculation: how many tokens it gives for the baseline's one."""
    if not made.options.get("speculate"):
        return ""
    return (
        f"{made.options['speculate']} tokens drafted from the text so far, {made.tokens_per_step:.2f} kept a step, "
        "each held against plain greedy decoding; the baseline's steps give one"
    )
