"""Limits of what a weight format may lose against the original model, by the bits of its codes.

They follow llama.cpp's figures for Llama-3-8B on WikiText-2 in windows of 512 tokens: q8_0 has a mean divergence of
0.0014 nats, q6_K 0.0055, q4_K_M 0.031, q4_0 0.072. Smaller models lose more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosel.decode.run import FEWEST_TOKENS, FormatQuality
from autosel.errors import AutoselError
from autosel.formats import find_weight_format
from autosel.values import Scalar, from_json


class BeyondLimit(AutoselError):
    """A weight format loses more quality than its limit allows, or too few tokens were scored."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most that a format may lose: mean divergence in nats per token, rise of ln(perplexity), share of tokens
    whose likeliest successor changes.
    """

    divergence: float
    difference: float = float("inf")
    changed: float = 1.0


LIMITS: Mapping[int, Limit] = {  # by bits; more bits than these have no limit
    4: Limit(divergence=0.05, difference=0.045),
    6: Limit(divergence=0.015),
    8: Limit(divergence=0.005, changed=0.03),
}


def limit_of(format: str) -> Limit | None:
    """Return the limit of a format: that of the next larger number of bits; None for plain weights."""
    bits = find_weight_format(format).bits
    return next((LIMITS[most] for most in sorted(LIMITS) if 0 < bits <= most), None)


def beyond(format: str, q: FormatQuality) -> str:
    """Return each figure that is beyond the format's limit, or ""."""
    limit = limit_of(format)
    if limit is None:
        return ""
    told = []
    if q.tokens < FEWEST_TOKENS:
        told.append(f"{q.tokens} tokens were scored; {FEWEST_TOKENS} are needed")
    if not q.mean_divergence <= limit.divergence:  # NaN too
        told.append(f"mean divergence {q.mean_divergence:.3g} nats a token, {limit.divergence:g} allowed")
    if not q.difference <= limit.difference:
        told.append(f"ln(perplexity) rises by {q.difference:.3g}, {limit.difference:g} allowed")
    if not 1 - q.same_first <= limit.changed:
        told.append(f"another likeliest token at {1 - q.same_first:.1%}, {limit.changed:.0%} allowed")
    return "\n".join(told)


def measured(stated: Mapping[str, Scalar]) -> FormatQuality:
    """Return the scores that a certificate states. Raises ValueError."""
    found: FormatQuality = from_json(FormatQuality, {k: v for k, v in stated.items() if k != "accepted"})
    return found


def refuse_beyond(format: str, found: FormatQuality | None, *, accepted: bool) -> None:
    """Raise BeyondLimit (exit code 3) if the format lost more than its limit and the user did not accept that."""
    told = beyond(format, found) if found is not None and not accepted else ""
    if found is not None and told:
        raise BeyondLimit(
            f"{format} loses too much against {found.original}",
            why=told,
            todo="use a format with more bits, or certify these figures with --accept-quality",
        )
