"""Keys and values of past tokens: contiguous [B, Hkv, Lmax, D] per layer, or pages [P, page, Hkv, D] and a block table.

The caller counts the tokens of each sequence, so a step can be undone by counting one less. All memory is allocated at
once, on 2 MiB pages if available.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autosel import devices
from autosel.decode.pages import PageArena, padded
from autosel.decode.run import Plan
from autosel.errors import UsageError
from autosel.models import cost
from autosel.models.shape import ModelShape
from autosel.values import DTYPE_BYTES, DTypeName

NOWHERE = -1  # block table entry of a page that is not assigned yet


@dataclass(slots=True, kw_only=True)
class Cache:
    """Keys `k[i]` and values `v[i]` of layer i. `block_table` int32 [B, blocks] makes the cache paged."""

    rows: int
    room: int  # tokens per sequence
    page: int  # 0: contiguous
    k: list[Tensor]
    v: list[Tensor]
    block_table: Tensor | None = None
    free: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # pages per row

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def reserve(self, row: int, tokens: int) -> None:
        """Reserve room for the row's first `tokens` tokens. Raises UsageError if there is none."""
        if tokens > self.room:
            raise UsageError(
                f"sequence {row} would hold {tokens} tokens; the cache has room for {self.room}",
                todo="make a longer cache, or stop earlier",
            )
        if self.block_table is None:
            return
        while self.held[row] * self.page < tokens:
            self.block_table[row, self.held[row]] = self.free.pop()
            self.held[row] += 1

    def part(self, first: int, last: int) -> Cache:
        """Return a view of some rows for one pass. It shares memory and assigns no pages."""
        table, rows = self.block_table, min(last, self.rows) - first
        if table is not None:
            return replace(self, rows=rows, block_table=table[first:last], free=[], held=self.held[first:last])
        k, v = ([t[first:last] for t in tensors] for tensors in (self.k, self.v))
        return replace(self, rows=rows, k=k, v=v)


def make_cache(
    shape: ModelShape, dtype: DTypeName, *, rows: int, room: int, page: int = 0, device: torch.device | str = "cpu"
) -> Cache:
    """Make an empty cache for `rows` sequences of at most `room` tokens; `page` above 0 makes it paged.

    A window does not make it shorter, because the ops address a cache by absolute position.
    """
    size = cost.cache_size(shape, rows, room, page)
    each = math.prod(size) * DTYPE_BYTES[dtype]
    arena = PageArena(2 * shape.layers * padded(each), torch.device(device))
    pairs = [(arena.tensor(size, dtype), arena.tensor(size, dtype)) for _ in range(shape.layers)]
    if not devices.on_host(torch.device(device).type):  # values beyond a row's length must be finite
        arena.memory.zero_()
    cache = Cache(rows=rows, room=room, page=page, k=[k for k, _ in pairs], v=[v for _, v in pairs])
    if page:
        blocks = -(-room // page)
        cache.block_table = torch.full((rows, blocks), NOWHERE, dtype=torch.int32, device=device)
        cache.free = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(0)).tolist()
        cache.held = [0] * rows
    return cache


def cache_bytes(plan: Plan) -> int:
    page = plan.page if plan.cache == "paged" else 0
    each = math.prod(cost.cache_size(plan.shape, plan.batch, plan.longest, page)) * DTYPE_BYTES[plan.dtype]
    return 2 * plan.layers_run * padded(each)
