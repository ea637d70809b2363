"""How much of a prompt goes through the layers at once, and what that holds.

A prompt's feed-forward tensors would outgrow weights and cache together (llama-1b: 48 KiB a token in each layer, 32 KiB
of cache in all). So each arm takes some rows at a time, and of those some positions.
"""

from __future__ import annotations

from autosel.decode.run import Plan
from autosel.values import DTYPE_BYTES

CHUNK = 2048  # positions of our pass; tokens of the baseline's, but for attention: products of full size all the same
PASS = 4 * CHUNK  # tokens of all rows in a pass, unless one row alone has more


def rows_at_once(positions: int) -> int:
    """How many rows of so many positions share a pass."""
    return max(1, PASS // positions)


def activation_bytes(plan: Plan) -> int:
    """What the larger of both arms' prompts holds at once; a synthetic prompt is not run.

    Ours holds the residual stream twice, projected heads and their rotated copy, and four feed-forward tensors; the
    norms' fp32 copies. The baseline holds the same of CHUNK tokens; of whole rows, for its attention sees all of a
    prompt, three of the stream and three of the heads.
    """
    if plan.prompt == "synthetic":
        return 0
    s, each, tokens = plan.shape, DTYPE_BYTES[plan.dtype], plan.seq - 1
    wide = each * (3 * s.d + 3 * s.qkv_rows)
    chunk = each * 4 * s.I + 3 * DTYPE_BYTES["fp32"] * s.d + wide
    ours = min(plan.batch, rows_at_once(min(tokens, CHUNK))) * min(tokens, CHUNK) * chunk
    theirs = min(plan.batch, rows_at_once(tokens)) * tokens
    return max(ours, theirs * wide + min(theirs, CHUNK) * chunk)
