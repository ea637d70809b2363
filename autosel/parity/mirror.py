"""Copies of operands on another device, with the layout of shared memory: guards, gaps and odd alignments included.

Before a call, all bytes of the operands and around them are copied to the device, and back after it. Status on CUDA:
not yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autosel import devices
from autosel.ops.stored import received, references
from autosel.parity.stage import FAR, FAR_GUARD_BYTES, GUARD_BYTES
from autosel.values import from_json
from autosel.workers.arena import Arena, Arenas, Ref

Extent = tuple[Arena, int, int]  # bytes [start, end) of an arena


class Mirror:
    """A buffer on `device` for each arena, of the same size."""

    def __init__(self, device: str) -> None:
        self.device = devices.named(device)
        self.torch_device = self.device.use()
        self._buffers: dict[str, torch.Tensor] = {}

    def push(self, values: Sequence[Any], arenas: Arenas) -> list[Any]:
        """Copy operands and the bytes around them to the device; return the values with tensors for references."""
        self._forget(arenas)
        for arena, start, end in _extents(values, arenas):
            self._buffer(arena)[start:end].copy_(arena.bytes(start, end))
        return [received(v, lambda ref: self._tensor(ref, arenas)) for v in values]

    def pull(self, values: Sequence[Any], arenas: Arenas) -> None:
        """Wait for the device, then copy its memory back. Raises the device's error."""
        self.device.drain()
        for arena, start, end in _extents(values, arenas):
            arena.bytes(start, end).copy_(self._buffer(arena)[start:end])

    def _tensor(self, value: Mapping[str, Any], arenas: Arenas) -> torch.Tensor:
        ref: Ref = from_json(Ref, value)
        dtype = getattr(torch, ref.dtype)
        if ref.span == 0:
            return torch.empty(ref.shape, dtype=dtype, device=self.torch_device)
        flat = self._buffer(arenas[ref.arena])[ref.offset : ref.offset + ref.span * dtype.itemsize]
        return flat.view(dtype).as_strided(ref.shape, ref.strides)

    def _buffer(self, arena: Arena) -> torch.Tensor:
        """Return the arena's buffer, some gigabytes for rows far apart. Raises the device's error without memory."""
        if arena.name not in self._buffers:
            if self.device.on_host:  # only touched pages exist, as in the arena
                made = Arena(arena.size_bytes).bytes(0, arena.size_bytes)
            else:
                made = self.device.memory(arena.size_bytes)
            self._buffers[arena.name] = made
        return self._buffers[arena.name]

    def _forget(self, arenas: Arenas) -> None:
        for name in set(self._buffers) - set(arenas):
            del self._buffers[name]


def _extents(values: Sequence[Any], arenas: Arenas) -> Iterator[Extent]:
    """Yield the bytes of each referenced tensor with its guards, or of each row if gigabytes are between rows."""
    for reference in (ref for value in values for ref in references(value)):
        ref: Ref = from_json(Ref, reference)
        arena, itemsize = arenas[ref.arena], getattr(torch, ref.dtype).itemsize
        rows, guard = [(ref.offset, ref.span)], GUARD_BYTES
        if ref.span > FAR:
            span = 1 + sum((n - 1) * s for n, s in zip(ref.shape[1:], ref.strides[1:], strict=True))
            rows = [(ref.offset + i * ref.strides[0] * itemsize, span) for i in range(ref.shape[0])]
            guard = FAR_GUARD_BYTES
        for start, span in rows:
            yield arena, max(0, start - guard), min(arena.size_bytes, start + span * itemsize + guard)
