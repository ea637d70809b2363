"""What a prompt's passes through the layers hold at once, beside weights and cache."""

from __future__ import annotations

from autosel.decode.run import Plan
from autosel.models.passes import CHUNK, rows_at_once
from autosel.values import DTYPE_BYTES


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
