"""Memory for a prompt's passes through the layers, in addition to weights and cache."""

from __future__ import annotations

from autosel.decode.run import Plan
from autosel.models.passes import CHUNK, rows_at_once
from autosel.values import DTYPE_BYTES


def activation_bytes(plan: Plan) -> int:
    """Return the most memory that either arm's prompt needs at once; a synthetic prompt does not run.

    The optimised arm holds the residual stream twice, projected heads and their rotated copy, four feed-forward
    tensors, and the norms' fp32 copies. The baseline holds the same for CHUNK tokens. Its attention sees whole prompts,
    so it also holds three copies of the stream and three of the heads for whole rows.
    """
    if plan.prompt == "synthetic":
        return 0
    s, each, tokens = plan.shape, DTYPE_BYTES[plan.dtype], plan.seq - 1
    wide = each * (3 * s.d + 3 * s.qkv_rows)
    chunk = each * 4 * s.I + 3 * DTYPE_BYTES["fp32"] * s.d + wide
    ours = min(plan.batch, rows_at_once(min(tokens, CHUNK))) * min(tokens, CHUNK) * chunk
    theirs = min(plan.batch, rows_at_once(tokens)) * tokens
    return max(ours, theirs * wide + min(theirs, CHUNK) * chunk)
