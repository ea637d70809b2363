"""Mutants that are right kernels: why, by op and name. Each must agree with the reference on points of the domains."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[tuple[str, str], str] = {
    ("paged_attn", "max_len off by +1"): "`lengths`, none of which is longer than max_len, says which keys count",
    ("sample", "history[, :] the neighbour's"): "the history is a set: the order of its tokens means nothing",
    (
        "add_rmsnorm",
        "result y with infinity clamped",
    ): "no operands that the contract admits have an infinite norm: beside an infinity it is NaN",
}


def reason(op: str, name: str) -> str:
    """Return why this mutant is right, or ""."""
    return REASONS.get((op, name), "")
