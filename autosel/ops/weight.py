"""A matrix of weights w[N, K] as an op takes it: a tensor, which is plain, or a `Weight`: codes and scales in a format.

    w = quantise(torch.randn(4096, 4096), "fp8_e4m3-row")
    autosel.best("linear")(x, w, None, None)

What is right: the product with the exact weight, (code - zero) * scale in float64. A contract begins at codes and
scales: how a caller came to them is the caller's.

What a candidate may round, besides what its op allows with a plain weight:

- the weight, once, to the dtype of x before the product;
- the scale, once, to the dtype of x: an error that a whole group shares, of the same size;
- where a row has one scale: the product, which is stored before it is scaled;
- a subnormal scale may count as zero.

`product_error` bounds all of these together. Roundings of different weights are independent and add in squares; a
rounding to nearest errs by u / 2 in root mean square. Equal weights round alike and move the sum by u of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from autosel import formats
from autosel.formats import WeightFormat
from autosel.ops.codes import CODES, TORCH_DTYPE
from autosel.ops.contract import DTYPE, TINY_NORMAL, U32, UNIT
from autosel.ops.rounding import LAMBDA, matmul_error
from autosel.ops.stored import Stored

BLOCK = 1 << 24  # elements converted at a time: a vocabulary's weights in fp32 would be gigabytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight(Stored):
    """`shape` is (N, K), whatever the codes' is."""

    KIND: ClassVar[str] = "weight"

    format: WeightFormat

    @classmethod
    def of(
        cls,
        format: str | WeightFormat,  # the word of the field
        *,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """`shape` may be left out where a code is an element of `codes`. Raises UnknownName."""
        found = formats.find_weight_format(format) if isinstance(format, str) else format
        return cls(
            format=found, shape=torch.Size(shape or codes.shape), codes=codes, scales=scales, zeros=zeros
        )  # fmt: skip

    def exact(self) -> Tensor:
        """float64 [N, K]."""
        numbers, k = CODES[self.format.code].numbers(self.codes), self.shape[1]
        if self.zeros is not None:
            numbers = numbers - self._along_k(self.zeros, k).double()
        return numbers * self._along_k(self.scales, k).double()

    def _along_k(self, part: Tensor, k: int) -> Tensor:
        """A scale or zero for each weight of a row."""
        return part.repeat_interleave(self.format.group, 1)[:, :k] if self.format.group else part[:, None]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The nearest matrix of a dtype, a block of rows at a time."""
        n, k = self.shape
        made = torch.empty(n, k, dtype=dtype, device=self.device)
        rows = max(1, BLOCK // k)
        for first in range(0, n, rows):
            made[first : first + rows] = self.rows(slice(first, first + rows)).exact()
        return made

    def rows(self, index: Any) -> Self:
        """Some rows, by a slice or by their numbers; a slice shares memory."""
        codes = self.codes[index]
        return type(self).of(
            self.format,
            codes=codes,
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            shape=(codes.shape[0], self.shape[1]),
        )

    def split(self, sizes: Sequence[int]) -> tuple[Self, ...]:
        """Consecutive rows, sharing memory, as `Tensor.split` gives them."""
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return tuple(self.rows(slice(a, b)) for a, b in pairwise(ends))

    @property
    def flushable(self) -> Tensor:
        """|w| in float64 where the scale is subnormal, 0 elsewhere."""
        small = self.scales.double().abs() < TINY_NORMAL["fp32"]
        return torch.where(self._along_k(small, self.shape[1]), self.exact().abs().nan_to_num(), 0.0)


Matrix = Tensor | Weight


# --- either ----------------------------------------------------------------------------------------------------------


def exact(w: Matrix) -> Tensor:
    """float64 [N, K]."""
    return w.double() if isinstance(w, Tensor) else w.exact()


def rows_of(w: Matrix, index: Any) -> Matrix:
    return w[index] if isinstance(w, Tensor) else w.rows(index)


def split(w: Matrix, sizes: Sequence[int]) -> tuple[Matrix, ...]:
    return tuple(w.split(list(sizes))) if isinstance(w, Tensor) else w.split(sizes)


def quantise(w: Tensor, format: str | WeightFormat) -> Matrix:
    """The matrix rounded to nearest in a format, scales chosen by each group's largest weight; plain returns it."""
    found = formats.find_weight_format(format) if isinstance(format, str) else format
    if found.plain:
        return w
    assert not found.group and len(found.parts) == 2, f"no quantiser for {found.name}"
    code, made = CODES[found.code], empty(found, *w.shape, device=w.device)
    each = max(1, BLOCK // w.shape[1])
    for first in range(0, w.shape[0], each):
        part, into = w[first : first + each].float(), made.rows(slice(first, first + each))
        into.scales.copy_(code.scale(part.abs().amax(1)))
        into.codes.copy_(code.nearest(part / into.scales[:, None]))
    return made


def empty(format: WeightFormat, n: int, k: int, *, device: torch.device | str = "cpu") -> Weight:
    """A matrix whose tensors hold anything."""
    parts = {
        p.name: torch.empty(p.shape(n, k), dtype=TORCH_DTYPE.get(str(p.dtype)) or DTYPE[str(p.dtype)], device=device)
        for p in format.parts
    }
    return Weight.of(format, shape=(n, k), **parts)


# --- what is right, and what may be rounded ---------------------------------------------------------------------------


def product(x: Tensor, w: Matrix) -> Tensor:
    """x @ w^T in float64."""
    made: Tensor = x.double() @ exact(w).T
    return made


def product_error(x: Tensor, w: Matrix, dtype: str, *, apart: float = 0.0, together: float = 0.0) -> Tensor:
    """Bound on x[M, K] @ w[N, K]^T before it is stored in `dtype`, the workload's; float64 [M, N].

    Elements of x may be off themselves: by `apart` of each, independently, and by `together` of all alike.
    """
    w64 = exact(w)
    error = matmul_error(x, w if isinstance(w, Tensor) else w64)
    if isinstance(w, Weight):
        apart, together = math.hypot(apart, LAMBDA * UNIT[dtype] / 2), together + UNIT[dtype]
    if apart or together:
        x64 = x.double()
        error = error + apart * (x64.square() @ w64.square().T).sqrt() + together * (x64 @ w64.T).abs()
    return error if isinstance(w, Tensor) else error + _format_error(x, w, w64, error, dtype)


def _format_error(x: Tensor, w: Weight, w64: Tensor, error: Tensor, dtype: str) -> Tensor:
    """Weights and scales that count as zero; the product of a row, stored before it is scaled, and the scaling."""
    small = torch.where(w64.abs() < TINY_NORMAL[dtype], w64.abs(), 0.0)
    flushed = x.double().abs() @ torch.maximum(small, w.flushable).T
    y = (x.double() @ w64.T).abs()
    added = flushed + U32 * y + TINY_NORMAL["fp32"]
    if w.format.group:
        return added
    return added + UNIT[dtype] * (y + error) + TINY_NORMAL[dtype] * w.scales.double().abs()
