"""Allocate tensors on large pages.

A stream over memory on 4 KiB pages translates an address every 4 KiB. On a virtual machine each translation is a walk
in two dimensions, and the stream runs at about half the rate of one on 2 MiB pages (measured: docs/method.md).
Long-running servers request large pages once, when loading; races do the same for all arms.
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
    """Return a contiguous tensor of zeros that starts on a large page, if the system grants one.

    This is only advice to the kernel: if transparent huge pages are off, or the tensor is smaller than a page, it lies
    on ordinary ones. It counts as the process's own memory, and is freed with its last view.
    """
    import math

    import torch

    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_PAGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory needs another setting for large pages
    memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=flags)  # room to align to a large page
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without support for them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE_BYTES
    return whole[start : start + size].view(dtype).view(tuple(shape))


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on large pages."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
