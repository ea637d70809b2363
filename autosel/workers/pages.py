"""Tensors on large pages.

A stream over memory on 4 KiB pages pays an address translation every 4 KiB, and on a virtual machine each is a walk in
two dimensions: it runs at about half the rate of the same stream on 2 MiB pages (measured: docs/method.md). Whoever
serves weights for long asks for large pages once, when loading; races hold their operands the same way, all arms alike.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

LARGE_PAGE_BYTES = 2 << 20  # x86-64 and AArch64 with 4 KiB base pages


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor that starts on a large page where the system grants them; contents are zero.

    Advice, not a demand: where transparent huge pages are off, or the tensor is smaller than a page, it lies on
    ordinary ones. Counts as the process's own memory, and goes with the last view of it.
    """
    import math

    import torch

    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_PAGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory is granted large pages by another setting
    memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=flags)  # room to start on a page of that size
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE_BYTES
    return whole[start : start + size].view(dtype).view(tuple(shape))


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on large pages."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
