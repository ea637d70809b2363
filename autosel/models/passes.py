"""Split a prompt into passes through the layers: some of its rows at a time, and some positions of these.

A prompt's feed-forward tensors would otherwise need more memory than weights and cache together (llama-1b: 48 KiB per
token in each layer, 32 KiB of cache in total).
"""

from __future__ import annotations

from dataclasses import dataclass

# positions of a pass of autosel; tokens of a pass of the baseline, except attention, whose products have full size
CHUNK = 2048
PASS = 4 * CHUNK  # tokens of all rows in a pass, unless a single row has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Process `positions` of each of `rows` prompts at once; `start` positions come before them."""

    rows: int
    start: int
    positions: int

    @property
    def tokens(self) -> int:
        return self.rows * self.positions


def rows_at_once(positions: int) -> int:
    """Return how many rows of so many positions share a pass."""
    return max(1, PASS // positions)


def passes(tokens: int, rows: int = 1) -> tuple[Pass, ...]:
    """Return the distinct passes of `rows` prompts of so many tokens, in order."""
    at_once = rows_at_once(min(tokens, CHUNK))
    parts = dict.fromkeys(min(at_once, rows - row) for row in range(0, rows, at_once))
    starts = range(0, tokens, CHUNK)
    return tuple(Pass(rows=r, start=s, positions=min(CHUNK, tokens - s)) for r in parts for s in starts)
