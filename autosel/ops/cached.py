"""Keys or values of a cache [B, H, L, D] as attention takes them: a tensor, which is plain, or a `Cached` in a format.

    k = quantise_cache(torch.randn(1, 8, 4096, 128), "fp8_e4m3-head")

What is right: attention over code * scale in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from autosel import formats
from autosel.formats import CacheFormat
from autosel.ops.codes import CODES
from autosel.ops.stored import Stored

DIMS = ("B", "H", "L", "D")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cached(Stored):
    """`shape` is (B, H, L, D)."""

    KIND: ClassVar[str] = "cache"

    format: CacheFormat

    @classmethod
    def of(
        cls,
        format: str | CacheFormat,  # the word of the field
        *,
        codes: Tensor,
        scales: Tensor,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """Raises UnknownName."""
        found = formats.find_cache_format(format) if isinstance(format, str) else format
        return cls(format=found, shape=torch.Size(shape or codes.shape), codes=codes, scales=scales)

    def numbers(self) -> Tensor:
        """What the codes stand for before they are scaled: float64 [B, H, L, D]."""
        return CODES[self.format.code].numbers(self.codes)

    def by_element(self, scales: Tensor | None = None) -> Tensor:
        """The scales (or something of their shape) in float64, to multiply [B, H, L, D] by."""
        given = self.scales if scales is None else scales
        sizes = dict(zip(DIMS, self.shape, strict=True))
        return given.double().view([sizes[dim] if dim in self.format.scaled else 1 for dim in DIMS])

    def exact(self) -> Tensor:
        """float64 [B, H, L, D]."""
        return self.numbers() * self.by_element()

    def pick(self, change: Callable[[Tensor], Tensor], scales: Tensor) -> Self:
        """Other codes, made of these, with the scales that go with them."""
        return type(self).of(self.format, codes=change(self.codes), scales=scales)


Cache = Tensor | Cached


# --- either -----------------------------------------------------------------------------------------------------------


def exact(cache: Cache) -> Tensor:
    """float64 [B, H, L, D]."""
    return cache.double() if isinstance(cache, Tensor) else cache.exact()


def numbers(cache: Cache) -> Tensor:
    """What is multiplied by `scales_of`: float64 [B, H, L, D]."""
    return cache.double() if isinstance(cache, Tensor) else cache.numbers()


def scales_of(cache: Cache) -> Tensor | None:
    """float64, to multiply [B, H, L, D] by; None for a plain cache."""
    return None if isinstance(cache, Tensor) else cache.by_element()


def first_keys(cache: Cache, keys: int) -> Any:
    """The first keys; shares memory."""
    if isinstance(cache, Tensor):
        return cache[:, :, :keys]
    assert "L" not in cache.format.scaled, f"{cache.format.name} has a scale for each key"
    return cache.pick(lambda codes: codes[:, :, :keys], cache.scales)


def some_heads(cache: Cache, rows: Tensor, heads: Tensor) -> Any:
    """Some KV heads of some batch rows: [rows, heads, L, D], a copy."""
    if isinstance(cache, Tensor):
        return cache[rows[:, None], heads]
    assert cache.format.scaled == ("H",), f"{cache.format.name} has other scales than one a head"
    return cache.pick(lambda codes: codes[rows[:, None], heads], cache.scales[heads])


def with_room(cache: Cache, keys: int) -> Any:
    """The same with zeros for more keys behind it."""
    if isinstance(cache, Tensor):
        b, h, _, width = cache.shape
        return torch.cat([cache, cache.new_zeros(b, h, keys, width)], 2)
    codes = with_room(cache.codes.view(torch.uint8), keys).view(cache.codes.dtype)
    return type(cache).of(cache.format, codes=codes, scales=cache.scales)


def write_key(cache: Cache, row: int, at: int, numbers: Tensor) -> None:
    """Key `at` of a batch row becomes these numbers [H, D], as nearly as the cache has them at its scales."""
    if isinstance(cache, Tensor):
        cache[row, :, at] = numbers.to(cache.dtype)
        return
    scales = cache.by_element()[0, :, 0]
    cache.codes[row, :, at] = CODES[cache.format.code].nearest(numbers.double() / scales)


def quantise_cache(x: Tensor, format: str | CacheFormat) -> Cache:
    """Keys or values rounded to nearest in a format; plain returns them. NaN stays, and chooses no scale."""
    found = formats.find_cache_format(format) if isinstance(format, str) else format
    if found.plain:
        return x
    code, shared = CODES[found.code], [i for i, dim in enumerate(DIMS) if dim not in found.scaled]
    largest = x.float().abs().nan_to_num(0.0).amax(shared, keepdim=True)
    scales = code.scale(largest)
    codes = code.nearest(x.float() / scales)
    shape = found.scales_shape(dict(zip(DIMS, x.shape, strict=True)))
    return Cached.of(found, codes=codes, scales=scales.view(shape))
