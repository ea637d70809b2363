"""Share memory for tensors between parent and worker: both see the same bytes, and only references are sent.

The creator makes an anonymous file of fixed size, sealed so that no holder can shrink it (which would crash the other
side on its next read); pages exist once touched. A `Ref` is the place of a tensor, in plain JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosel.errors import WorkerError
from autosel.values import from_json

if TYPE_CHECKING:
    import torch

ALIGN_BYTES = 64  # a cache line, and the widest vector
_NAMES = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """Locate a tensor in an arena: byte offset, shape and strides (in elements), dtype by torch's name (`bfloat16`)."""

    arena: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def span(self) -> int:
        """Return the number of elements from the first to the last one, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


class Arena:
    """Allocate from shared memory, upwards. `fd` is the descriptor to pass to a worker."""

    def __init__(self, size_bytes: int, *, touched_bytes: int | None = None) -> None:
        """`touched_bytes`: the part of it that will be used at most (default: all); a worker's memory limit grows by no
        more. Raises OSError if it cannot be reserved."""
        self.name = f"arena{next(_NAMES)}"
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.memory = mmap.mmap(self.fd, self.size_bytes)
        self.used_bytes = 0
        self.touched_bytes = self.size_bytes if touched_bytes is None else touched_bytes

    @classmethod
    def attached(cls, name: str, fd: int, size_bytes: int) -> Arena:
        """Return the other side's view, which takes over the descriptor."""
        self = cls.__new__(cls)
        self.name, self.size_bytes, self.fd, self.used_bytes = name, size_bytes, -1, 0
        self.touched_bytes = size_bytes
        self.memory = mmap.mmap(fd, size_bytes)
        os.close(fd)
        return self

    # --- carving ----------------------------------------------------------------------------------------------------

    def reserve(self, count_bytes: int, *, align_bytes: int = ALIGN_BYTES) -> int:
        """Return the byte offset of a new block. Raises WorkerError if the arena is full."""
        offset = -(-self.used_bytes // align_bytes) * align_bytes
        if offset + count_bytes > self.size_bytes:
            raise WorkerError(
                f"shared memory is full: {count_bytes} bytes do not fit",
                cause="memory",
                why=f"{self.used_bytes} of {self.size_bytes} bytes are in use",
                retryable=True,
            )
        self.used_bytes = offset + count_bytes
        return offset

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None, *, shift_bytes: int = 0
    ) -> Ref:
        """Reserve a tensor, `shift_bytes` past an aligned address, without initialising it."""
        strides = tuple(strides) if strides is not None else contiguous(shape)
        name = str(dtype).removeprefix("torch.")
        span = Ref(arena=self.name, offset=0, shape=tuple(shape), strides=strides, dtype=name).span
        offset = self.reserve(span * dtype.itemsize + shift_bytes) + shift_bytes
        return Ref(arena=self.name, offset=offset, shape=tuple(shape), strides=strides, dtype=name)

    def put(self, tensor: torch.Tensor) -> Ref:
        """Copy a tensor into the arena, contiguously."""
        ref = self.empty(tensor.shape, tensor.dtype)
        self.tensor(ref).copy_(tensor)
        return ref

    def release(self, used_bytes: int) -> None:
        """Go back to an earlier `used_bytes`, and give the pages behind it back to the system."""
        start = -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = -(-self.used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > start:
            self.memory.madvise(mmap.MADV_REMOVE, start, end - start)
        self.used_bytes = used_bytes

    # --- seeing -----------------------------------------------------------------------------------------------------

    def tensor(self, ref: Ref) -> torch.Tensor:
        """Return a view of the tensor at this reference. Raises ValueError if it would leave the arena."""
        import torch

        dtype = getattr(torch, ref.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {ref.dtype!r}")
        span = ref.span
        if min(ref.offset, span, *ref.shape, *ref.strides) < 0 or ref.offset % dtype.itemsize:
            raise ValueError(f"a tensor at byte {ref.offset} with strides {ref.strides}")
        if ref.offset + span * dtype.itemsize > self.size_bytes:
            raise ValueError(f"{span} elements at byte {ref.offset} leave the arena ({self.size_bytes} bytes)")
        if span == 0:
            return torch.empty(ref.shape, dtype=dtype)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=span, offset=ref.offset)
        return flat.as_strided(ref.shape, ref.strides)

    def bytes(self, start: int, end: int) -> torch.Tensor:
        """Return bytes [start, end) as a uint8 view."""
        import torch

        if end <= start:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=end - start, offset=start)

    def close(self) -> None:
        """Release the memory; it is freed when the last tensor that views it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):  # a tensor still views it
            self.memory.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Arenas(dict[str, Arena]):
    """Hold a worker's arenas, by name."""

    def tensor(self, ref: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor of a reference in a message. Raises ValueError if the reference is invalid."""
        found: Ref = from_json(Ref, ref)
        if found.arena not in self:
            raise ValueError(f"no arena {found.arena!r}")
        return self[found.arena].tensor(found)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
