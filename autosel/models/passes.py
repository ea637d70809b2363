"""The passes in which a prompt goes through the layers: some of its rows at once, and of those some positions.

A prompt's feed-forward tensors would otherwise outgrow weights and cache together (llama-1b: 48 KiB a token in each
layer, 32 KiB of cache in all).
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 2048  # positions of our pass; tokens of the baseline's, but for attention: products of full size all the same
PASS = 4 * CHUNK  # tokens of all rows in a pass, unless one row alone has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """`positions` of each of `rows` prompts at once, the first of them after `start` others."""

    rows: int
    start: int
    positions: int

    @property
    def tokens(self) -> int:
        return self.rows * self.positions


def rows_at_once(positions: int) -> int:
    """How many rows of so many positions share a pass."""
    return max(1, PASS // positions)


def passes(tokens: int, rows: int = 1) -> tuple[Pass, ...]:
    """What `rows` prompts of so many tokens take, in order. Of passes alike, one."""
    at_once = rows_at_once(min(tokens, CHUNK))
    parts = dict.fromkeys(min(at_once, rows - row) for row in range(0, rows, at_once))
    starts = range(0, tokens, CHUNK)
    return tuple(Pass(rows=r, start=s, positions=min(CHUNK, tokens - s)) for r in parts for s in starts)
