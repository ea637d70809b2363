"""A matrix of weights w[N, K] as an op takes it: a plain tensor, or a `Weight` with codes and scales in a format.

    w = quantise(torch.randn(4096, 4096), "fp8_e4m3-row")
    autosel.best("linear")(x, w, None, None)

The reference is the product with the exact weight, (code - zero) * scale + offset in float64. A contract starts at
codes and scales; the caller chooses how to quantise.

In addition to the roundings of a plain weight, a candidate may round:

- the weight, once, to the dtype of x before the product;
- the scale, once, to the dtype of x: an error of the same size that a whole group shares;
- if a row has one scale: the product, which is stored before it is scaled;
- a subnormal scale to zero.

A candidate may add a group's offset times the sum of its x instead of an offset per weight. Then its terms are up to
|code * scale| + |offset| times |x|, which may exceed the weight's, and infinite x may give NaN; no case has it with
such a format. The bound has these terms. It has no rounding of an offset, or of a scale beside an offset: their errors
would not cancel as the numbers do. A zero point beside a scale is the offset -scale * zero.

`product_error` bounds all of these together. Roundings of different weights are independent and add in squares;
rounding to nearest has an RMS error of u / 2. Equal weights round equally and change the sum by u of itself. So do the
equal weights of a group, and those that share a rounded scale: the products of a group with positive weights, and those
with negative ones, each add up before they are squared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from autosel import formats
from autosel.formats import Part, WeightFormat
from autosel.ops.codes import CODES, TORCH_DTYPE, Code
from autosel.ops.draw import Draw
from autosel.ops.dtypes import DTYPE, TINY_NORMAL, U32, UNIT
from autosel.ops.one_thread import each
from autosel.ops.rounding import LAMBDA, matmul_error
from autosel.ops.scales import SCALES
from autosel.ops.stored import Stored

BLOCK = 1 << 18  # elements converted at a time; with larger temporaries, which leave the cache, it takes 5x as long
DISTINCT = 1 << 24  # drawn weights of a matrix; more of them are these in another order
FEWEST_GROUPS = 8  # in a row of such a matrix: 40,320 orders
PART = 1 << 20  # elements of a part of a matrix that is rounded or converted at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight(Stored):
    """A matrix in a format. `shape` is (N, K), even if the codes' shape differs."""

    KIND: ClassVar[str] = "weight"

    format: WeightFormat

    @classmethod
    def of(
        cls,
        format: str | WeightFormat,  # named like the field
        *,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """Make a matrix from its parts. `shape` is optional if `codes` has it, or if K is whole groups.

        Raises UnknownName.
        """
        found = formats.find_weight_format(format) if isinstance(format, str) else format
        if shape is None and found.parts[0].per > 1:  # rows of codes are whole lines, so the scales of groups tell K
            part = found.parts[1]
            k = scales.shape[1] // part.count * part.per if part.per else CODES[found.code].count(codes)[-1]
            shape = (codes.shape[0], k)
        return cls(
            format=found, shape=torch.Size(shape or codes.shape), codes=codes, scales=scales, zeros=zeros
        )  # fmt: skip

    def exact(self) -> Tensor:
        """Return float64 [N, K]."""
        scales, offsets = self.groups()
        made = self._scaled(scales)
        return made if offsets is None else made + self.along_k(offsets)

    def _scaled(self, scales: Tensor) -> Tensor:
        """Return (code - zero) * scale in the dtype of the scales: exact in float64, rounded once in fp32."""
        k = self.shape[1]
        numbers = CODES[self.format.code].numbers(self.codes, scales.dtype)[:, :k]  # a row of codes may be longer
        if self.zeros is not None:
            numbers = numbers - self.along_k(self.zeros).to(scales.dtype)
        group = self.format.group
        if group and k % group == 0:  # without a scale for each weight in memory
            numbers = numbers.unflatten(1, (-1, group))
            return torch.mul(numbers, scales[:, : k // group, None]).flatten(1)  # scales may fill up a block
        return torch.mul(numbers, self.along_k(scales))

    def groups(self) -> tuple[Tensor, Tensor | None]:
        """Return each group's scale and offset in float64: [N, groups], or [N] or [N, 1] if a row has one."""
        return SCALES[self.format.scaling].read(self.scales)

    def terms(self, exact: Tensor) -> Tensor:
        """Return the size of each weight's terms in float64: |w|, or |code * scale| + |offset|. `exact` is w."""
        _, offsets = self.groups()
        if offsets is None:
            return exact.abs()
        offset = self.along_k(offsets)
        return (exact - offset).abs() + offset.abs()

    def along_k(self, part: Tensor) -> Tensor:
        """Return a scale, offset or zero for each weight: [N, K], or [N, 1] if a row has one."""
        group, k = self.format.group, self.shape[1]
        return part[..., None].expand(-1, -1, group).flatten(1)[:, :k] if group else part.view(-1, 1)

    def dequantised(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the nearest matrix of a dtype, computed in blocks of rows; in `out` if that is given."""
        n, k = self.shape
        made = torch.empty(n, k, dtype=dtype, device=self.device) if out is None else out
        rows = max(1, BLOCK // k)
        for first in range(0, n, rows):
            made[first : first + rows] = self.rows(slice(first, first + rows))._nearest(dtype)
        return made

    def _nearest(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix for rounding to a dtype: in fp32, twice as fast, if one multiplication there rounds once.
        Scales are exact in fp32."""
        scales, offsets = self.groups()
        return self._scaled(scales.float()) if offsets is None and dtype == torch.float32 else self.exact()

    def rows(self, index: Any) -> Self:
        """Return some rows, by a slice or by their numbers; a slice shares memory."""
        codes = self.codes[index]
        return type(self).of(
            self.format,
            codes=codes,
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            shape=(codes.shape[0], self.shape[1]),
        )

    def split(self, sizes: Sequence[int]) -> tuple[Self, ...]:
        """Return consecutive parts of the rows, sharing memory, like `Tensor.split`."""
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return tuple(self.rows(slice(a, b)) for a, b in pairwise(ends))

    def may_flush(self, dtype: str) -> bool:
        """Return False if no weight, rounded to `dtype`, and no scale in fp32 is subnormal. It looks at scales alone:
        without offsets the smallest weight but 0 is a scale times the smallest positive code.
        """
        if self.format.offsets:
            return True
        sizes, least = self.groups()[0].abs(), min(CODES[self.format.code].least, 1.0)
        return not bool(((sizes * least >= max(TINY_NORMAL[dtype], TINY_NORMAL["fp32"])) | (sizes == 0)).all())

    @property
    def flushable(self) -> Tensor:
        """Return |w| in float64 where the scale is subnormal in fp32, 0 elsewhere."""
        small = self.groups()[0].abs() < TINY_NORMAL["fp32"]
        if not small.any():  # as in nearly all weights
            return torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        return torch.where(self.along_k(small), self.terms(self.exact()).nan_to_num(), 0.0)


Matrix = Tensor | Weight


# --- either ----------------------------------------------------------------------------------------------------------


def exact(w: Matrix) -> Tensor:
    """Return float64 [N, K]."""
    return w.double() if isinstance(w, Tensor) else w.exact()


def rows_of(w: Matrix, index: Any) -> Matrix:
    return w[index] if isinstance(w, Tensor) else w.rows(index)


def parts_of(w: Matrix) -> Iterator[Matrix]:
    """Yield consecutive parts of the rows of PART elements, sharing memory."""
    rows = max(1, PART // w.shape[1])
    for first in range(0, w.shape[0], rows):
        yield rows_of(w, slice(first, first + rows))


def split(w: Matrix, sizes: Sequence[int]) -> tuple[Matrix, ...]:
    return tuple(w.split(list(sizes))) if isinstance(w, Tensor) else w.split(sizes)


def quantise(w: Tensor, format: str | WeightFormat) -> Matrix:
    """Round a matrix to nearest in a format, scaled by each group's largest weight; plain changes nothing."""
    found = formats.find_weight_format(format) if isinstance(format, str) else format
    if found.plain:
        return w
    assert "zeros" not in (part.name for part in found.parts), f"no quantiser for {found.name}"
    code, made = CODES[found.code], empty(found, *w.shape, dtype=w.dtype, device=w.device)
    each = max(1, BLOCK // w.shape[1])
    for first in range(0, w.shape[0], each):
        part, into = w[first : first + each].float(), made.rows(slice(first, first + each))
        SCALES[found.scaling].write(into.scales, *_spread(found, code, part))
        scales, offsets = into.groups()
        rest = part if offsets is None else part - into.along_k(offsets).float()
        wide = into.along_k(scales).float()
        into.codes.copy_(code.nearest(torch.where(wide == 0, 0.0, rest / wide)))
    return made


def drawn(draw: Draw, n: int, k: int, format: WeightFormat) -> Matrix:
    """Return a projection's random weights in a format.

    Quantising 500 M weights takes seconds, so the codes of a large matrix are those of a few thousand rows again and
    again, with their groups in another order each time. Without enough orders for rows to differ, all are quantised.
    """
    rows, unit = DISTINCT // k, math.lcm(*(part.per for part in format.parts if part.per))
    if format.plain or n <= rows or k % unit or k // unit < FEWEST_GROUPS:
        return quantise(draw.weight(n, k), format)
    first, made = quantise(draw.weight(rows, k), format), empty(format, n, k, dtype=draw.dtype)
    for at in range(0, n, rows):
        order, into = draw.permutation(k // unit), made.rows(slice(at, at + rows))
        for part in format.parts:
            source = getattr(first, part.name)[: into.shape[0]]
            again = source.unflatten(1, (len(order), -1))[:, order].flatten(1) if part.per else source
            getattr(into, part.name).copy_(again)
    return made


def _spread(format: WeightFormat, code: Code, w: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the scale of each group, and with offsets the weight of code 0, so that its least weight, or 0 if that is
    less, has the lowest code. Codes with a sign need no offset, but may have a zero point.
    """
    groups = _groups(w, format.group)
    if not format.offsets or (code.signed and format.scaling not in formats.WITH_ZEROS):
        scales = code.scale(groups.abs().amax(-1))
        return scales, torch.zeros_like(scales) if format.offsets else None
    least, lowest = groups.amin(-1).clamp_max(0.0), -code.most if code.signed else 0.0
    scales = code.scale((groups.amax(-1).clamp_min(0.0) - least) * (code.most / (code.most - lowest)))
    return scales, least - lowest * scales


def _groups(w: Tensor, group: int) -> Tensor:
    """Return [N, groups, group], filled up with zeros."""
    each = group or w.shape[1]
    whole: Tensor = torch.nn.functional.pad(w, (0, -w.shape[1] % each)).unflatten(1, (-1, each))
    return whole


def empty(
    format: WeightFormat,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    place: Callable[[int], Tensor] | None = None,
) -> Weight:
    """Return a matrix with uninitialised tensors. `dtype` is that of parts whose format names none; `place` returns
    memory, as bytes."""

    def of(part: Part) -> Tensor:
        own = dtype if part.dtype is None else TORCH_DTYPE.get(part.dtype) or DTYPE[part.dtype]
        shape = part.shape(n, k)
        if place is None:
            return torch.empty(shape, dtype=own, device=device)
        return place(math.prod(shape) * own.itemsize).view(own).view(shape)

    return Weight.of(format, shape=(n, k), **{p.name: of(p) for p in format.parts})


# --- the product and its bound ----------------------------------------------------------------------------------------


def product(x: Tensor, w: Matrix) -> Tensor:
    """Return x @ w^T in float64."""
    x64 = x.double()
    return _by_rows(w, lambda part: x64 @ exact(part).T)


def product_error(
    x: Tensor, w: Matrix, dtype: str, *, apart: float = 0.0, together: float = 0.0, flushed: Tensor | None = None
) -> Tensor:
    """Return a bound on x[M, K] @ w[N, K]^T before it is stored in `dtype`, the workload's; float64 [M, N].

    Elements of x may have errors themselves: `apart` of each, independently, `together` of all equally, and `flushed`
    [M, K], which are no share of it.
    """

    def of(part: Matrix) -> Tensor:
        w64 = exact(part)
        error = _product_error(x, part, w64, dtype, apart, together)
        return error if flushed is None else error + flushed @ w64.abs().T

    return _by_rows(w, of)


def _by_rows(w: Matrix, made: Callable[[Matrix], Tensor]) -> Tensor:
    """Apply `made` to parts of the rows, so that its temporaries fit a cache, and join the results."""
    rows = max(1, BLOCK // max(1, w.shape[1]))
    if rows >= w.shape[0]:
        return made(w)
    return torch.cat(each(made, (rows_of(w, slice(at, at + rows)) for at in range(0, w.shape[0], rows))), -1)


def _product_error(x: Tensor, w: Matrix, w64: Tensor, dtype: str, apart: float, together: float) -> Tensor:
    if isinstance(w, Tensor):
        error = matmul_error(x, w)
    else:
        error = matmul_error(x, w.terms(w64) if w.format.offsets else w64)
        apart, together = math.hypot(apart, LAMBDA * UNIT[dtype] / 2), together + UNIT[dtype]
    if not apart and not together:
        return error
    x64 = x.double()
    y = (x64 @ w64.T).abs()
    squares = apart**2 * (x64.square() @ w64.square().T)
    if isinstance(w, Weight) and w.format.group:
        squares = squares + (LAMBDA * UNIT[dtype] / 2) ** 2 * _of_groups(x64, w64, w.format.group)
    error = error + squares.sqrt() + together * y
    return error if isinstance(w, Tensor) else error + _format_error(x64, w, w64, y, error, dtype)


def _of_groups(x: Tensor, w: Tensor, group: int) -> Tensor:
    """Return the sum over groups of the squared products with positive weights, and with negative ones [M, N]."""
    x, w = x.nan_to_num(0.0, 0.0, 0.0), w.nan_to_num(0.0, 0.0, 0.0)  # a product with others has no bound
    if filling := -w.shape[1] % group:
        x, w = torch.nn.functional.pad(x, (0, filling)), torch.nn.functional.pad(w, (0, filling))
    some, weights = x.unflatten(1, (-1, group)).permute(1, 2, 0), w.unflatten(1, (-1, group)).transpose(0, 1)
    positive = weights.clamp_min(0.0) @ some  # [groups, N, M]
    negative = weights @ some - positive
    squares: Tensor = (positive.square_() + negative.square_()).sum(0).T
    return squares


def _format_error(x: Tensor, w: Weight, w64: Tensor, y: Tensor, error: Tensor, dtype: str) -> Tensor:
    """Return the error of a format: weights and scales flushed to zero, a row's product stored before scaling, the
    scaling. x is in float64, y is |x @ w^T|.
    """
    added = U32 * y + TINY_NORMAL["fp32"]
    if w.may_flush(dtype):
        small = torch.where(w64.abs() < TINY_NORMAL[dtype], w64.abs(), 0.0)
        added = added + x.abs() @ torch.maximum(small, w.flushable).T
    if w.format.group:
        return added
    return added + UNIT[dtype] * (y + error) + TINY_NORMAL[dtype] * w.groups()[0].flatten().abs()
