"""The original model of weights in codes, on a text: what a format loses is measured against it.

    known = original(plan, text, "checkpoints/llama", listener)    # before the codes are loaded
    known.logits(slice(0, 1), slice(0, 64))                        # of the first window, after its first 64 tokens

The text is cut into windows of at most WINDOW scored tokens, because limits (certify/limits.py) were measured so, and
longer windows only take longer. The original is read in its own dtype and computes in fp32. Only its hidden states and
its output head stay in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from autosel import models
from autosel.decode.cache import make_cache
from autosel.decode.reference import Reference
from autosel.decode.run import FEWEST_TOKENS, Listener, Plan, Silent, Text
from autosel.decode.weights import load_weights, refuse_unloadable
from autosel.errors import UsageError
from autosel.formats import PLAIN
from autosel.models.passes import rows_at_once

WINDOW = 512
CHUNK = 64  # positions whose logits are computed at a time
SAME = ("layers", "d", "Hq", "Hkv", "D", "I", "V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The original's results on a text."""

    source: str  # its folder or file
    stored: str  # how its weights are stored, if not in an ordinary dtype
    windows: Tensor  # int64 [W, S + 1]
    hidden: Tensor  # fp32 [W, S, d], normalised for the output head
    head: Tensor  # [V, d]

    def logits(self, windows: slice, positions: slice) -> Tensor:
        """Return fp32 logits [W, S, V]."""
        return F.linear(self.hidden[windows, positions], self.head.float())


def original(plan: Plan, text: Text, source: str, listener: Listener | None = None) -> Original:
    """Run the text through the original model. Raises UsageError (another model, no memory), BadConfig."""
    listener, own = listener or Silent(), plan_of(plan, source)
    weights = load_weights(own, listener)
    rows = torch.tensor(text_windows(text.tokens, plan.batch, plan.model.max_context), device=weights.device)
    nothing = make_cache(weights.shape, weights.dtype, rows=len(rows), room=1, device=weights.device)
    found, each = [], rows_at_once(rows.shape[1])
    with torch.inference_mode():
        eager = Reference(weights, torch.float32)
        for first in range(0, len(rows), each):
            listener.stage("original", source, first, len(rows))
            found.append(eager.hidden(rows[first : first + each, :-1], nothing, 0))
        head = weights.head
        assert isinstance(head, Tensor), "the original was loaded in plain formats"
    stored = weights.note.removeprefix("weights: ")
    return Original(source=source, stored=stored, windows=rows, hidden=torch.cat(found), head=head.clone())


def refuse_other_original(plan: Plan, source: str) -> None:
    """Raise UsageError or BadConfig for an original that cannot be read or is another model. Only headers are read."""
    refuse_unloadable(plan_of(plan, source))


def plan_of(plan: Plan, source: str) -> Plan:
    """Return the plan that loads the original: plain weights in its own dtype. Raises UsageError for another model."""
    known = plan.model if source == plan.weights else models.load(source)
    model = models.stored_as(known, PLAIN)
    for size in SAME:
        ours, theirs = getattr(plan.model, size), getattr(model, size)
        if ours != theirs:
            raise UsageError(
                f"--original {source} is another model",
                why=f"{size} is {theirs}; {plan.model.name} has {ours}",
                todo="name the checkpoint that the codes were made from",
            )
    weights = models.weights_of(source) if source != plan.weights else source
    if weights == "random":
        raise UsageError(f"--original {source} has no weights", todo="name a checkpoint folder or a GGUF file")
    seq = min(WINDOW, model.max_context)
    return replace(
        plan, model=model, weights=weights, dtype=model.dtype, batch=1, seq=seq, iters=1, advance=False, speculate=0,
        cache="contiguous", step="ops", sampling=type(plan.sampling)(),
    )  # fmt: skip


def text_windows(tokens: tuple[int, ...], rows: int, context: int) -> list[list[int]]:
    """Return equal windows, each with a token more than is scored; their number is a multiple of the rows of a batch.

    They are the text's beginning: FEWEST_TOKENS are scored if it has as many.
    """
    count = -(-FEWEST_TOKENS // min(WINDOW, context - 1) // rows) * rows
    count = count if len(tokens) > count else rows
    each = max(1, min(WINDOW, context - 1, (len(tokens) - 1) // count, -(-FEWEST_TOKENS // count)))
    return [list(tokens[w * each : (w + 1) * each + 1]) for w in range(count)]


def scored(tokens: tuple[int, ...], rows: int, context: int) -> int:
    found = text_windows(tokens, rows, context)
    return len(found) * (len(found[0]) - 1)
