"""Random operands from a seed, and the hostile variations every op shares."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autosel.ops.contract import DTYPE, Case
from autosel.values import DTypeName, Workload

if TYPE_CHECKING:
    from autosel.ops.contract import Op


class Draw:
    """A seeded source of tensors in one dtype. Values are drawn in fp32 and rounded once: the operands are exact."""

    def __init__(self, seed: int, dtype: DTypeName) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = DTYPE[dtype]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self._tiled(shape, scale).to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """A projection's weights: variance 1/fan-in, so that outputs are of order one."""
        return self._tiled(shape, 1.0 / math.sqrt(shape[-1])).to(self.dtype)

    def around_one(self, *shape: int, offset: float = 0.0) -> Tensor:
        """A norm's weights: near one, or near zero where an offset of one is added."""
        return (torch.randn(shape, generator=self.generator) * 0.1 + (1.0 - offset)).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def _tiled(self, shape: tuple[int, ...], scale: float) -> Tensor:
        """Normal values; past 16 Mi elements a block is repeated with a shift, for drawing 500 M of them takes seconds.

        The period, 2^24 - 3 elements, is prime, so that no row or tile of a real shape repeats another.
        """
        count = math.prod(shape)
        period = (1 << 24) - 3
        block = torch.randn(min(count, period), generator=self.generator).mul_(scale)
        if count <= period:
            return block.view(shape)
        out = torch.empty(count, dtype=self.dtype)
        for start in range(0, count, period):
            part = out[start : start + period]
            part.copy_(block[: part.numel()])
        return out.view(shape)


def hostile_rows(op: Op, w: Workload, *, rows: str, count_dim: str, width_dim: str) -> tuple[Case, ...]:
    """Cases for an op that treats each row of tensor `rows` [count, width] on its own."""
    raise NotImplementedError("filled in beside the other ops")


__all__ = ["Any", "Draw", "hostile_rows"]
