"""The scales of a weight's groups, and what is added to their weights, from the tensor that stores them.

    one     a number per group (or per row): its scale
    pair    two numbers per group: scale d and offset m; a weight is d q + m
    zeros   two numbers per group: scale s and zero point z, an integer of 0 to 15; a weight is s (q - z), so the offset
            is -s z
    zeros-8 the same for signed codes of 8 bits: z is an integer of -128 to 127
    q4_k    for each 256 weights: fp16 d and e; eight bytes of scales s, then of minimums t, one for each 32 weights.
            A weight is d s q - e t
    q6_k    for each 256 weights: sixteen int8 scales s, one for each 16 weights; fp16 d. A weight is d s q
    q6_k-m  for each 256 weights: sixteen int8 scales s as for q6_k; eight bytes of minimums t, one for each 32 weights;
            fp16 d and e. A weight is d s q - e t

A product of fp16 and an integer of eight bits is exact in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from autosel.formats import Scaling
from autosel.ops.draw import Draw

Groups = tuple[Tensor, Tensor | None]  # scales and offsets, float64 [N, groups]


class Scales(ABC):
    """How a tensor stores scales."""

    @abstractmethod
    def read(self, stored: Tensor) -> Groups:
        """Return scale and offset of each group, exactly."""

    @abstractmethod
    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        """Store the nearest scales [N, groups] and offsets; they are finite, and a scale is zero only in a block."""

    @abstractmethod
    def numbers(self, stored: Tensor) -> Tensor:
        """Return the numbers in floating point that it holds, as a copy or a view, in order."""

    @abstractmethod
    def put(self, stored: Tensor, numbers: Tensor, draw: Draw) -> None:
        """Replace these numbers by others of any size, so that a group's scale has about the size of its number; draw
        the integers of blocks."""

    @abstractmethod
    def spoil(self, stored: Tensor) -> None:
        """Make some numbers of each kind NaN, and one of the first row."""


class One(Scales):
    def read(self, stored: Tensor) -> Groups:
        return stored.double(), None

    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        stored.copy_(_normal(scales, stored.dtype).view(stored.shape))

    def numbers(self, stored: Tensor) -> Tensor:
        return stored

    def put(self, stored: Tensor, numbers: Tensor, draw: Draw) -> None:
        stored.copy_(_held(numbers, stored.dtype).view(stored.shape))

    def spoil(self, stored: Tensor) -> None:
        stored.view(-1)[::5] = float("nan")


class Pair(One):
    def read(self, stored: Tensor) -> Groups:
        return stored[..., ::2].double(), stored[..., 1::2].double()

    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        assert offsets is not None
        most = torch.finfo(stored.dtype).max
        stored[..., ::2] = _normal(scales, stored.dtype)
        stored[..., 1::2] = offsets.clamp(-most, most)

    def spoil(self, stored: Tensor) -> None:
        pairs = stored.unflatten(-1, (-1, 2))
        pairs[::4, ::5, 0] = float("nan")
        pairs[2::4, ::5, 1] = float("nan")


class Zeros(Pair):
    least: ClassVar[int] = 0
    most: ClassVar[int] = 15

    def read(self, stored: Tensor) -> Groups:
        scales = stored[..., ::2].double()
        return scales, -scales * stored[..., 1::2].double()

    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        assert offsets is not None
        stored[..., ::2] = _normal(scales, stored.dtype)
        stored[..., 1::2] = (-offsets / stored[..., ::2].float()).round().clamp(self.least, self.most)

    def numbers(self, stored: Tensor) -> Tensor:
        return stored[..., ::2]

    def put(self, stored: Tensor, numbers: Tensor, draw: Draw) -> None:
        """Replace the scales, and draw zero points: a third of them are the smallest or the largest."""
        scales, beyond = self.numbers(stored), (self.most - self.least + 1) // 4
        scales.copy_(_held(numbers, stored.dtype).view(scales.shape))
        drawn = draw.integers(self.least - beyond, self.most + beyond + 1, *scales.shape)
        stored[..., 1::2] = drawn.clamp(self.least, self.most).to(stored.dtype)


class SignedZeros(Zeros):
    least, most = -128, 127


class Blocks(Scales):
    """fp16 numbers of a block at byte `at` of `size`, integers elsewhere."""

    size: ClassVar[int]
    at: ClassVar[int]
    halves: ClassVar[int]
    share = 64.0  # a number is so much smaller than the scale that it gives with a large integer

    def numbers(self, stored: Tensor) -> Tensor:
        return self._halves(stored)

    def put(self, stored: Tensor, numbers: Tensor, draw: Draw) -> None:
        self._put_halves(stored, _held(numbers / self.share, torch.float16))
        self._put_integers(stored, draw)

    def spoil(self, stored: Tensor) -> None:
        found = self._halves(stored)
        found.view(-1)[::5] = float("nan")
        self._put_halves(stored, found)

    @abstractmethod
    def _put_integers(self, stored: Tensor, draw: Draw) -> None: ...

    def _blocks(self, stored: Tensor) -> Tensor:
        found: Tensor = stored.unflatten(-1, (-1, self.size))
        return found

    def _halves(self, stored: Tensor) -> Tensor:
        """Return fp16 [..., blocks, halves], as a copy."""
        found = self._blocks(stored)[..., self.at : self.at + 2 * self.halves]
        copied: Tensor = torch.empty_like(found, memory_format=torch.contiguous_format).copy_(found).view(torch.float16)
        return copied

    def _put_halves(self, stored: Tensor, numbers: Tensor) -> None:
        blocks = self._blocks(stored)
        made = numbers.to(torch.float16).reshape(*blocks.shape[:-1], self.halves).contiguous().view(torch.uint8)
        blocks[..., self.at : self.at + 2 * self.halves] = made


class FourK(Blocks):
    size, at, halves = 20, 0, 2

    def read(self, stored: Tensor) -> Groups:
        blocks, halves = self._blocks(stored), self._halves(stored).double()
        scales = halves[..., :1] * blocks[..., 4:12].double()
        offsets = halves[..., 1:] * -blocks[..., 12:20].double()
        return scales.flatten(-2), offsets.flatten(-2)

    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        assert offsets is not None
        (d, s), (e, t) = _shared(scales, 8, 63), _shared(-offsets, 8, 63)
        blocks = self._blocks(stored)
        blocks[..., 4:12], blocks[..., 12:20] = s.to(torch.uint8), t.to(torch.uint8)
        self._put_halves(stored, torch.cat((d, e), -1))

    def _put_integers(self, stored: Tensor, draw: Draw) -> None:
        blocks = self._blocks(stored)
        drawn = draw.integers(0, 64, *blocks.shape[:-1], 16)
        drawn.view(-1)[::9] = 255
        blocks[..., 4:20] = drawn.to(torch.uint8)


class SixK(Blocks):
    size, at, halves = 18, 16, 1

    def read(self, stored: Tensor) -> Groups:
        integers = self._blocks(stored)[..., :16].contiguous().view(torch.int8)
        return (self._halves(stored)[..., :1].double() * integers.double()).flatten(-2), None

    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        d, s = _shared(scales, 16, 127)
        self._blocks(stored)[..., :16] = s.to(torch.int8).view(torch.uint8)
        self._put_halves(stored, d)

    def _put_integers(self, stored: Tensor, draw: Draw) -> None:
        blocks = self._blocks(stored)
        blocks[..., :16] = draw.integers(-128, 128, *blocks.shape[:-1], 16).to(torch.int8).view(torch.uint8)


class SixKWithMinimums(SixK):
    size, at, halves = 28, 24, 2

    def read(self, stored: Tensor) -> Groups:
        minimums = self._blocks(stored)[..., 16:24].double()
        offsets = self._halves(stored)[..., 1:].double() * -minimums.repeat_interleave(2, -1)
        return super().read(stored)[0], offsets.flatten(-2)

    def write(self, stored: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        """Store the nearest scales and offsets; two groups share the offset of the first."""
        assert offsets is not None
        (d, s), (e, t) = _shared(scales, 16, 127), _shared(-offsets[..., ::2], 8, 127)
        blocks = self._blocks(stored)
        blocks[..., :16], blocks[..., 16:24] = s.to(torch.int8).view(torch.uint8), t.to(torch.uint8)
        self._put_halves(stored, torch.cat((d, e), -1))

    def _put_integers(self, stored: Tensor, draw: Draw) -> None:
        super()._put_integers(stored, draw)
        blocks = self._blocks(stored)
        blocks[..., 16:24] = draw.integers(0, 256, *blocks.shape[:-1], 8).to(torch.uint8)


SCALES: Mapping[Scaling, Scales] = {
    "one": One(),
    "pair": Pair(),
    "zeros": Zeros(),
    "zeros-8": SignedZeros(),
    "q4_k": FourK(),
    "q6_k": SixK(),
    "q6_k-m": SixKWithMinimums(),
}


def _normal(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales of which none becomes zero or infinite in the dtype."""
    limits = torch.finfo(dtype)
    found: Tensor = scales.clamp(limits.smallest_normal, limits.max)
    return found


def _shared(values: Tensor, groups: int, most: int) -> tuple[Tensor, Tensor]:
    """Return fp16 numbers [N, blocks, 1] and integers up to `most` whose products are near the values."""
    blocks = pad(values, (0, -values.shape[-1] % groups)).double().unflatten(-1, (-1, groups))
    d = _normal(blocks.abs().amax(-1, keepdim=True) / most, torch.float16).half()
    return d, (blocks / d.double()).round().clamp(-most, most)


def _held(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers that the dtype holds: fp16 has a smaller range than hostile cases were made for.

    Numbers above it become an eighth of its largest number, those below it subnormals.
    """
    if dtype != torch.float16:
        return numbers
    limits, size = torch.finfo(dtype), numbers.abs()
    small = limits.smallest_normal * (torch.arange(1, len(numbers) + 1) % 15 + 1) / 16
    size = torch.where((size > 0) & (size < limits.smallest_normal), small, size.clamp_max(limits.max / 8))
    return size.copysign(numbers)
