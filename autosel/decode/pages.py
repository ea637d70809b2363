"""Memory for weights and caches: a few large mappings, on 2 MiB pages if available."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autosel import devices
from autosel.errors import UsageError
from autosel.ops.contract import DTYPE
from autosel.values import DTYPE_BYTES, DTypeName

ALIGN = 4096  # alignment of each tensor: whole pages, so that threads share none


class PageArena:
    """One mapping that is divided into tensors, in order. It lives as long as they do."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.used = 0
        try:
            self.memory = devices.of_torch(device).memory(size_bytes)
        except (OSError, ValueError, torch.OutOfMemoryError) as error:
            raise UsageError(
                f"cannot allocate {size_bytes / 2**30:.1f} GiB of memory",
                why=str(error)[:200],
                todo="use fewer --layers, a shorter --seq or a smaller --batch",
            ) from error

    def tensor(self, shape: Sequence[int], dtype: DTypeName) -> Tensor:
        """Return a tensor: uninitialised on a GPU, zeros on a CPU (untouched pages)."""
        return self.bytes(math.prod(shape) * DTYPE_BYTES[dtype]).view(DTYPE[dtype]).view(*shape)

    def bytes(self, size: int) -> Tensor:
        """Return uint8 [size]."""
        assert self.used + size <= len(self.memory), "the arena was sized for fewer tensors"
        part = self.memory[self.used : self.used + size]
        self.used += padded(size)
        return part


def padded(size_bytes: int) -> int:
    """Return the bytes that a tensor needs in an arena."""
    return -(-size_bytes // ALIGN) * ALIGN
