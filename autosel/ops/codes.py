"""The numbers that a format's codes represent, and the code nearest to a number.

Contracts start at the codes; the caller chooses how to quantise. Every e4m3 number is exact in bf16, fp16 and fp32,
including subnormals, which no conversion may flush; 0x7f and 0xff are NaN, and there is no infinity. int8 is -128 to
127; a quantiser uses -127 to 127. int4 is -8 to 7, stored as 0 to 15 (a quantiser uses -7 to 7), two codes per byte,
the first in the lower half; a row is whole lines of 128 codes. uint4 is 0 to 15 in the same order.

q4_k (0 to 15) and q6_k (-32 to 31) are in blocks of 256 codes. A block is 2 or 3 lines of 64 bytes; a line is 16 words
of 32 bits, and word l of each line holds codes 16 l to 16 l + 15 together (the classes below say where).
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

    @property
    def signed(self) -> bool:
        """Return True if there are negative numbers."""
        return True

    def numbers(self, codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the codes' numbers, which are exact in fp32 too."""
        return codes.to(dtype)

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

    def pack(self, stored: Tensor) -> Tensor:
        """Return codes of less than a byte, uint8 with one per byte and in whole lines, as they are stored."""
        raise NotImplementedError

    def lowest(self, shape: tuple[int, ...]) -> Tensor:
        """Return codes that all have the lowest number, such as int8's -128, which no quantiser produces."""
        return self.all[self.numbers(self.all).nan_to_num(0.0).argmin()].expand(shape)

    @property
    def nans(self) -> Tensor:
        """Return the codes of NaN."""
        return self.all[self.numbers(self.all).isnan()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nibbles(Code):
    """Two codes per byte, stored plus `bias`."""

    line: int = 128  # codes
    bias: int = 8

    @property
    def signed(self) -> bool:
        return self.bias > 0

    def numbers(self, codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(dtype) - self.bias

    def count(self, codes: Tensor) -> tuple[int, ...]:
        return (*codes.shape[:-1], 2 * codes.shape[-1])

    def nearest(self, numbers: Tensor) -> Tensor:
        """Return the codes of the nearest numbers in the range; a row is filled up with zeros."""
        inside = numbers.float().clamp(-float(self.bias), self.most).round() + self.bias
        filled = torch.nn.functional.pad(inside, (0, -inside.shape[-1] % self.line), value=float(self.bias))
        return self.pack(filled.to(torch.uint8))

    def pack(self, stored: Tensor) -> Tensor:
        pairs = stored.unflatten(-1, (-1, 2))
        packed: Tensor = pairs[..., 0] | pairs[..., 1] << 4
        return packed

    @property
    def all(self) -> Tensor:
        """Return each byte once: all pairs of codes."""
        return torch.arange(256, dtype=torch.uint8)

    def lowest(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    @property
    def nans(self) -> Tensor:
        return self.all[:0]

    def every_finite(self, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return self.all[draw.permutation(torch.Size(shape).numel()) % 256].view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fours(Nibbles):
    """Q4_K: two lines. A word's lower half has codes 0, 2, 4, 6 of its eight, lowest first, the upper half the others;
    the first line has a word's first eight codes.
    """

    def numbers(self, codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(dtype).unflatten(-1, (-1, 2, 16, 2, 4))
        found: Tensor = pairs.movedim(-3, -4).transpose(-1, -2).flatten(-5)
        return found

    def pack(self, stored: Tensor) -> Tensor:
        ordered = stored.unflatten(-1, (-1, 16, 2, 4, 2)).transpose(-1, -2).movedim(-3, -4)
        packed: Tensor = (ordered[..., ::2] | ordered[..., 1::2] << 4).flatten(-5)
        return packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sixes(Fours):
    """Q6_K: three lines, in two's complement. Code 2 r + h of a word is in its 16-bit half h: r = 0, 1 in bits 0 to 5
    and 6 to 11 of the first line, 2 and 3 of the second, 4 and 5 of the third. The other bits of the first and second
    line are the lowest four of r = 6 and 7; bits 12 to 15 of the third are the upper two of each.
    """

    def numbers(self, codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        lines = codes.unflatten(-1, (-1, 3, 16, 2, 2)).int()
        words = lines[..., 0] | lines[..., 1] << 8  # [..., blocks, 3, 16, 2]
        first, second, third = words.unbind(-3)
        low = [w >> shift & 63 for w in (first, second, third) for shift in (0, 6)]
        rest = [first >> 12 | (third >> 12 & 3) << 4, second >> 12 | (third >> 14) << 4]
        found = torch.stack((*low, *rest), -2)  # [..., blocks, 16, 8, 2]
        return (found - (found >> 5 << 6)).flatten(-4).to(dtype)

    def count(self, codes: Tensor) -> tuple[int, ...]:
        return (*codes.shape[:-1], codes.shape[-1] * 4 // 3)

    def nearest(self, numbers: Tensor) -> Tensor:
        inside = numbers.float().clamp(-self.most - 1, self.most).round()
        filled = torch.nn.functional.pad(inside, (0, -inside.shape[-1] % self.line))
        return self.pack((filled.to(torch.int8) & 63).view(torch.uint8))

    def pack(self, stored: Tensor) -> Tensor:
        c = stored.unflatten(-1, (-1, 16, 8, 2)).unbind(-2)
        low = torch.stack((c[0] | c[1] << 6, c[2] | c[3] << 6, c[4] | c[5] << 6), -3)  # bits above 8 are lost
        high = (c[1] >> 2 | c[6] << 4, c[3] >> 2 | c[7] << 4, c[5] >> 2 | c[6] >> 4 << 4 | c[7] >> 4 << 6)
        packed: Tensor = torch.stack((low, torch.stack(high, -3)), -1).flatten(-5)
        return packed

    @property
    def signed(self) -> bool:
        return True

    def lowest(self, shape: tuple[int, ...]) -> Tensor:
        return self.nearest(torch.full(self.count(torch.empty(shape)), -self.most - 1))


CODES: Mapping[str, Code] = {
    "e4m3": Code(dtype=torch.float8_e4m3fn, most=448.0, least=2.0**-9),
    "int8": Code(dtype=torch.int8, most=127.0, least=1.0),
    "int4": Nibbles(dtype=torch.uint8, most=7.0, least=1.0),
    "uint4": Nibbles(dtype=torch.uint8, most=15.0, least=1.0, bias=0),
    "q4_k": Fours(dtype=torch.uint8, most=15.0, least=1.0, bias=0, line=256),
    "q6_k": Sixes(dtype=torch.uint8, most=31.0, least=1.0, line=256),
}
TORCH_DTYPE: Mapping[str, torch.dtype] = {"uint8": torch.uint8, "int8": torch.int8}  # dtypes of integer parts
