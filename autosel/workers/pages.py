"""Allocate tensors on large pages.

A stream over memory on 4 KiB pages translates an address every 4 KiB. On a virtual machine each translation is a walk
in two dimensions, and the stream runs at about half the rate of one on 2 MiB pages (measured: docs/method.md).
Long-running servers request large pages once, when loading; races do the same for all arms.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

LARGE_PAGE_BYTES = 2 << 20  # x86-64 and AArch64 with 4 KiB base pages
CHUNK_BYTES = 256 << 20  # of a mapping that is divided


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of zeros that starts on a large page, if the system grants one.

    This is only advice to the kernel: if transparent huge pages are off, or the tensor is smaller than a page, it lies
    on ordinary ones. It counts as the process's own memory, and is freed with its last view.
    """
    import torch

    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_PAGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    return _part(*_mapped(size), size).view(dtype).view(tuple(shape))


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on large pages."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)


class Reused:
    """Memory on large pages for the copies of one workload after another.

    Pages of a new mapping are zeroed at their first touch. A hypervisor that has taken free memory back needs ten times
    as long to give it again: 1.7 s per GB on one machine, more than all samples of a workload.
    """

    def __init__(self) -> None:
        self.chunks: list[tuple[mmap.mmap, int, int]] = []  # each with its first large page and its bytes
        self.size = CHUNK_BYTES  # of the next chunk
        self.lent: list[StorageWeakRef] = []
        self.at, self.used = 0, 0  # the chunk that is being divided, and how far

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy, valid until `restart`. Its storage is its own."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        if tensor.nbytes < LARGE_PAGE_BYTES:
            return tensor.clone(memory_format=torch.contiguous_format)
        part = self._take(tensor.nbytes)
        self.lent.append(StorageWeakRef(part.untyped_storage()))
        return part.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def restart(self) -> None:
        """Divide the memory again from its start, next time in one chunk.

        A chunk with a tensor in use is not divided again; it is freed with the tensor.
        """
        if len(self.chunks) > 1 or not all(storage.expired() for storage in self.lent):
            self.size = max(self.size, sum(size for _, _, size in self.chunks))
            self.chunks.clear()
        self.lent.clear()
        self.at, self.used = 0, 0

    def _take(self, size: int) -> torch.Tensor:
        while self.at < len(self.chunks) and self.used + size > self.chunks[self.at][2]:
            self.at, self.used = self.at + 1, 0
        if self.at == len(self.chunks):
            whole = max(size, self.size if not self.chunks else CHUNK_BYTES)
            self.chunks.append((*_mapped(whole), whole))
        memory, start, _ = self.chunks[self.at]
        part = _part(memory, start + self.used, size)
        self.used += -(-size // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        return part


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """Return a mapping, and the offset of its first large page."""
    import torch

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory needs another setting for large pages
    memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=flags)  # room to align to a large page
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without support for them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE_BYTES


def _part(memory: mmap.mmap, offset: int, size: int) -> torch.Tensor:
    """Return bytes of a mapping, which lives as long as they do."""
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
