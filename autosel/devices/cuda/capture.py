"""Record calls in a CUDA graph, and leave the process usable if they cannot be recorded.

If a call breaks its capture, PyTorch neither returns to the stream it came from nor ends the capture in its allocator,
which then fails at every later capture: one such call would spoil all later captures.

Status: not yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosel.devices.device import UncapturableError

WARM_CALLS = 3  # before a capture: Triton compiles, libraries choose and allocate

_BROKEN: list[Any] = []  # graphs whose capture failed: PyTorch's allocators may still ask for their stream


def captured(enqueue: Callable[[int], None], count: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """Return the graph of the work that `enqueue(count)` puts on the current stream of `device`, whichever device is
    current.

    It is warmed on the stream on which it is captured, so the memory that a kernel keeps per stream already exists and
    is not part of the graph's own memory. Raises UncapturableError, or the error of a call.
    """
    with torch.cuda.device(device):
        before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            enqueue(WARM_CALLS)
        before.wait_stream(stream)
        torch.cuda.synchronize(device)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # On a stream of this device: without one, PyTorch captures on a stream of the device that was current at
            # its first capture; work for another device then runs at once and is missing from the graph.
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                enqueue(count)
        except RuntimeError as error:
            torch.cuda.set_stream(before)
            _abandon(graph, pool)
            torch.cuda.synchronize(device)
            first = error.__context__  # the error of the call, before its capture could not be ended either
            raise UncapturableError(str(first or error)) from error
        return graph


def _abandon(graph: Any, pool: Any) -> None:
    """End, in PyTorch's allocator, a capture that CUDA could not end."""
    _BROKEN.append(graph)
    try:
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    except (RuntimeError, AttributeError):  # it was already ended: the call failed, its capture did not
        return
