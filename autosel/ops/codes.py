"""The numbers that a format's codes represent, and the code nearest to a number.

Contracts start at the codes; the caller chooses how to quantise. Every e4m3 number is exact in bf16, fp16 and fp32,
including subnormals, which no conversion may flush; 0x7f and 0xff are NaN, and there is no infinity. int8 is -128 to
127; a quantiser uses -127 to 127. int4 is -8 to 7, stored as 0 to 15 (a quantiser uses -7 to 7), two codes per byte,
the first in the lower half; a row is whole lines of 128 codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autosel.ops.draw import Draw
from autosel.ops.dtypes import TINY_NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Codes of one byte. A quantiser maps a group's largest number to `most`; `least` is the smallest positive one."""

    dtype: torch.dtype
    most: float
    least: float

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the codes' numbers as float64."""
        return codes.double()

    def count(self, codes: Tensor) -> tuple[int, ...]:
        """Return the shape of the codes' numbers."""
        return tuple(codes.shape)

    def nearest(self, numbers: Tensor) -> Tensor:
        """Return the codes of the nearest numbers, limited to the range. NaN stays NaN if it has a code."""
        inside = numbers.float().clamp(-self.most, self.most)
        return inside.to(self.dtype) if self.dtype.is_floating_point else inside.round().to(self.dtype)

    def scale(self, largest: Tensor) -> Tensor:
        """Return the fp32 scale that maps `largest` to `most`: 1 for zero, and never subnormal."""
        return torch.where(largest > 0, (largest.float() / self.most).clamp_min(TINY_NORMAL["fp32"]), 1.0)

    @property
    def all(self) -> Tensor:
        """Return each code once."""
        return torch.arange(256, dtype=torch.uint8).view(self.dtype)

    def every_finite(self, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Return all codes of finite numbers, repeated, in random order."""
        known = self.all[self.numbers(self.all).isfinite()].view(torch.uint8)
        order = draw.permutation(torch.Size(shape).numel()) % len(known)
        return known[order].view(self.dtype).view(shape)

    @property
    def nans(self) -> Tensor:
        """Return the codes of NaN."""
        return self.all[self.numbers(self.all).isnan()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nibbles(Code):
    """Two codes per byte, stored plus 8."""

    line: int = 128  # codes

    def numbers(self, codes: Tensor) -> Tensor:
        return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).double() - 8

    def count(self, codes: Tensor) -> tuple[int, ...]:
        return (*codes.shape[:-1], 2 * codes.shape[-1])

    def nearest(self, numbers: Tensor) -> Tensor:
        """Return the codes of the nearest numbers, from -8 to 7; a row is filled up with zeros."""
        inside = numbers.float().clamp(-8.0, self.most).round() + 8
        whole = torch.nn.functional.pad(inside, (0, -inside.shape[-1] % self.line), value=8.0).to(torch.uint8)
        pairs = whole.unflatten(-1, (-1, 2))
        packed: Tensor = pairs[..., 0] | pairs[..., 1] << 4
        return packed

    @property
    def all(self) -> Tensor:
        """Return each byte once: all pairs of codes."""
        return torch.arange(256, dtype=torch.uint8)

    @property
    def nans(self) -> Tensor:
        return self.all[:0]

    def every_finite(self, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return self.all[draw.permutation(torch.Size(shape).numel()) % 256].view(shape)


CODES: Mapping[str, Code] = {
    "e4m3": Code(dtype=torch.float8_e4m3fn, most=448.0, least=2.0**-9),
    "int8": Code(dtype=torch.int8, most=127.0, least=1.0),
    "int4": Nibbles(dtype=torch.uint8, most=7.0, least=1.0),
}
TORCH_DTYPE: Mapping[str, torch.dtype] = {"uint8": torch.uint8, "int8": torch.int8}  # dtypes of integer parts
