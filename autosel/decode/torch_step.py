"""The step by PyTorch alone, as before autosel: one of the forms that a step may have.

Whole steps race against it, so that a run never serves anything slower than the baseline. `ops`, the list of the same
step, holds place, cache and buffers, and names the weights of a step; of its calls, only the choice of tokens runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosel.decode.eager import Eager
from autosel.decode.run import Chain
from autosel.decode.step import Call, Rewritten, Step

AS_PYTORCH = Chain(attn="normed", mlp="normed")  # the ops of PyTorch's step


@dataclass(slots=True, kw_only=True)
class TorchStep(Rewritten):
    """One decode step of sequences of equal length, by the baseline's own code (eager.py)."""

    eager: Eager
    last: list[Call]  # the calls of the list after the logits: the choice of the tokens

    @staticmethod
    def of(ops: Step) -> TorchStep:
        calls = ops.calls
        head = max(i for i, call in enumerate(calls) if call.op == "lm_head")
        return TorchStep(ops=ops, eager=Eager(ops.decoder.weights), last=calls[head + 1 :])

    def run(self) -> None:
        place = self.place
        self.logits.copy_(self.eager.logits(place.tokens[:, None], self.cache, place.longest - 1))
        for call in self.last:
            call.function(*call.arguments)

    def settle(self) -> None:
        self.ops.settle()

    @property
    def replaced(self) -> list[Call]:
        """Return the calls of the list that PyTorch's code replaces."""
        return self.ops.calls[: len(self.ops.calls) - len(self.last)]
