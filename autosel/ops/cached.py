"""Keys or values of a cache [B, H, L, D] as attention takes them: a plain tensor, or a `Cached` in a format.

    k = quantise_cache(torch.randn(1, 8, 4096, 128), "fp8_e4m3-head")

The reference is attention over code * scale in float64.
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
    """Keys or values in a format. `shape` is (B, H, L, D)."""

    KIND: ClassVar[str] = "cache"

    format: CacheFormat

    @classmethod
    def of(
        cls,
        format: str | CacheFormat,  # named like the field
        *,
        codes: Tensor,
        scales: Tensor,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """Make a cache from its parts. Raises UnknownName."""
        found = formats.find_cache_format(format) if isinstance(format, str) else format
        return cls(format=found, shape=torch.Size(shape or codes.shape), codes=codes, scales=scales)

    def numbers(self) -> Tensor:
        """Return the codes' numbers before scaling: float64 [B, H, L, D]."""
        return CODES[self.format.code].numbers(self.codes)

    def by_element(self, scales: Tensor | None = None) -> Tensor:
        """Return the scales (or values of their shape) in float64, broadcastable to [B, H, L, D]."""
        given = self.scales if scales is None else scales
        sizes = dict(zip(DIMS, self.shape, strict=True))
        return given.double().view([sizes[dim] if dim in self.format.scaled else 1 for dim in DIMS])

    def exact(self) -> Tensor:
        """Return float64 [B, H, L, D]."""
        return self.numbers() * self.by_element()

    def pick(self, change: Callable[[Tensor], Tensor], scales: Tensor) -> Self:
        """Return a cache with changed codes and the scales that belong to them."""
        return type(self).of(self.format, codes=change(self.codes), scales=scales)


Cache = Tensor | Cached


# --- either -----------------------------------------------------------------------------------------------------------


def exact(cache: Cache) -> Tensor:
    """Return float64 [B, H, L, D]."""
    return cache.double() if isinstance(cache, Tensor) else cache.exact()


def numbers(cache: Cache) -> Tensor:
    """Return the numbers before `scales_of` is applied: float64 [B, H, L, D]."""
    return cache.double() if isinstance(cache, Tensor) else cache.numbers()


def scales_of(cache: Cache) -> Tensor | None:
    """Return float64 scales, broadcastable to [B, H, L, D]; None for a plain cache."""
    return None if isinstance(cache, Tensor) else cache.by_element()


def first_keys(cache: Cache, keys: int) -> Any:
    """Return the first keys; they share memory."""
    if isinstance(cache, Tensor):
        return cache[:, :, :keys]
    assert "L" not in cache.format.scaled, f"{cache.format.name} has a scale for each key"
    return cache.pick(lambda codes: codes[:, :, :keys], cache.scales)


def some_heads(cache: Cache, rows: Tensor, heads: Tensor) -> Any:
    """Return a copy of some KV heads of some batch rows: [rows, heads, L, D]."""
    if isinstance(cache, Tensor):
        return cache[rows[:, None], heads]
    assert cache.format.scaled == ("H",), f"{cache.format.name} has other scales than one a head"
    return cache.pick(lambda codes: codes[rows[:, None], heads], cache.scales[heads])


def with_room(cache: Cache, keys: int) -> Any:
    """Return the cache with zeros for more keys after it."""
    if isinstance(cache, Tensor):
        b, h, _, width = cache.shape
        return torch.cat([cache, cache.new_zeros(b, h, keys, width)], 2)
    codes = with_room(cache.codes.view(torch.uint8), keys).view(cache.codes.dtype)
    return type(cache).of(cache.format, codes=codes, scales=cache.scales)


def write_key(cache: Cache, row: int, at: int, numbers: Tensor) -> None:
    """Write the numbers [H, D] to key `at` of a batch row, rounded to the cache's scales."""
    if isinstance(cache, Tensor):
        cache[row, :, at] = numbers.to(cache.dtype)
        return
    scales = cache.by_element()[0, :, 0]
    cache.codes[row, :, at] = CODES[cache.format.code].nearest(numbers.double() / scales)


def quantise_cache(x: Tensor, format: str | CacheFormat) -> Cache:
    """Round keys or values to nearest in a format; plain changes nothing. NaN stays and does not affect scales."""
    found = formats.find_cache_format(format) if isinstance(format, str) else format
    if found.plain:
        return x
    code, shared = CODES[found.code], [i for i, dim in enumerate(DIMS) if dim not in found.scaled]
    largest = x.float().abs().nan_to_num(0.0).amax(shared, keepdim=True)
    scales = code.scale(largest)
    codes = code.nearest(x.float() / scales)
    shape = found.scales_shape(dict(zip(DIMS, x.shape, strict=True)))
    return Cached.of(found, codes=codes, scales=scales.view(shape))
