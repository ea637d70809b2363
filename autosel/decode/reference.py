"""The decoder of eager.py in a given precision and in bounded memory: some rows of a weight are converted at a time.

In a higher precision than the run's it is the reference for every arm. In the dtype of the run it shows by how much
PyTorch's own arithmetic errs, without the baseline's forms of weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from autosel.decode.cache import Cache
from autosel.decode.eager import Eager
from autosel.decode.weights import Weights
from autosel.ops.eager_stored import by_parts
from autosel.ops.weight import Matrix


def logits_after(weights: Weights, tokens: Tensor, cache: Cache, held: int, precision: torch.dtype) -> Tensor:
    """Return logits [B * S, V] after each of the tokens [B, S], which follow `held` others in an unchanged cache."""
    pass_ = Reference(weights, precision)
    return pass_.times(pass_.hidden(tokens, cache, held).flatten(0, 1), weights.head)


class Reference(Eager):
    """One decoder that converts weights, keys and values to a precision, and does not append to the cache."""

    def __init__(self, weights: Weights, precision: torch.dtype) -> None:
        super().__init__(weights)
        self.precision = precision

    def times(self, x: Tensor, w: Matrix) -> Tensor:
        """Return x @ w^T with the weight in the precision."""
        return F.linear(x, w) if isinstance(w, Tensor) and w.dtype == x.dtype else by_parts(x, w)

    def _wide(self, t: Tensor) -> Tensor:
        return t.to(self.precision)

    def _past(self, cache: Cache, i: int, k: Tensor, v: Tensor, held: int, first: int) -> tuple[Tensor, Tensor]:
        """Return keys and values from `first` on, the new ones last."""
        old = (self._wide(c[i][:, :, first:held]) for c in (cache.k, cache.v))
        wide_k, wide_v = (torch.cat((a, b), 2) for a, b in zip(old, (k, v), strict=True))
        return wide_k, wide_v
