"""Memory for what a step streams: weights and caches, on 2 MiB pages where the system offers them.

A step touches gigabytes once, in order. On 4 KiB pages each needs an address translation of its own, which on virtual
machines costs as much as the reading does.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from autosel.errors import UsageError
from autosel.ops.contract import DTYPE
from autosel.values import DTYPE_BYTES, DTypeName

HUGE = 2 << 20
ALIGN = 4096  # of each tensor: whole pages, so that threads share none
OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Arena:
    """One mapping that tensors are cut from, in order. It lives as long as they do."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = math.ceil(max(size_bytes, 1) / HUGE) * HUGE
        self.used = 0
        self.memory = _mapped(self.size_bytes) if device.type == "cpu" else _allocated(self.size_bytes, device)

    def tensor(self, shape: Sequence[int], dtype: DTypeName) -> Tensor:
        """Uninitialised on a GPU, zeros on a CPU (untouched pages)."""
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        assert self.used + size <= self.size_bytes, "the arena was sized for fewer tensors"
        part = self.memory[self.used : self.used + size]
        self.used += padded(size)
        return part.view(DTYPE[dtype]).view(*shape)


def padded(size_bytes: int) -> int:
    """What a tensor takes of an arena."""
    return -(-size_bytes // ALIGN) * ALIGN


def huge_pages_offered() -> bool:
    """Does the system back a mapping that asks for it with 2 MiB pages?"""
    try:
        return "[never]" not in OFFERED.read_text()
    except OSError:
        return False


def _mapped(size: int) -> Tensor:
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise _too_much(size) from error
    if hasattr(mmap, "MADV_HUGEPAGE") and huge_pages_offered():
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)  # keeps the mapping alive


def _allocated(size: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise _too_much(size) from error


def _too_much(size: int) -> UsageError:
    return UsageError(
        f"no {size / 2**30:.1f} GiB of memory to be had",
        todo="use fewer --layers, a shorter --seq or a smaller --batch",
    )
