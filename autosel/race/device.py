"""Placement of operands and timing of samples: consecutive calls on a CPU, the replay of a CUDA graph on a GPU.

Status of `Gpu`: not yet run on silicon.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from time import (
    perf_counter_ns as clock_ns,
)  # bound before any candidate is loaded, so that patching `time` has no effect
from typing import Any, Protocol

import torch
from torch import Tensor

from autosel.native.cuda import DRIVER
from autosel.race.capture import UncapturableError, captured
from autosel.race.drawn import Drawn
from autosel.race.idle import wait_until_idle
from autosel.workers import pages

Calls = Sequence[tuple[Any, ...]]  # arguments of each of an arm's calls, one for each copy of its operands
Outputs = Sequence[tuple[Any, ...]]  # sets of outputs, None for an arm that allocates its own
NO_OUTPUTS: Outputs = ((),)
PROBE_S = 0.02
PERSISTING_L2_SIZE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE, cuda.h
HELD_CYCLES = 200_000  # about 0.1 ms: longer than the host takes to enqueue two events and a graph


class Timed(Protocol):
    """An arm's calls in order, ready to be timed."""

    def sample(self, calls: int, drawn: Drawn | None = None) -> float:
        """Return nanoseconds per call over at least `calls` consecutive calls.

        `drawn` gives the set of outputs of each call; without it all calls write into the first.
        """

    call: Callable[..., Any]
    result: Any  # of the last call
    slot: int  # the set of outputs that it was given
    kept: list[Any]  # results of the drawn calls


class Place(Protocol):
    """One kind of device."""

    timing: str  # the method of taking samples, for tables
    draws: bool  # calls of a sample can have separate outputs

    def resident(self, value: Tensor) -> Tensor:
        """Return a private copy of an operand that is warm."""

    def streamed(self, value: Tensor) -> Tensor:
        """Return a private copy of an operand that must be cold: same strides, same distance from a boundary."""

    def output(self, value: Tensor) -> Tensor: ...

    def timed(self, call: Callable[..., Any], calls: Calls, outputs: Outputs = NO_OUTPUTS) -> Timed:
        """Return the calls, timed, without their outputs; `outputs`: the sets to write into."""

    def hush(self) -> None:
        """Prepare `calls` for timing. They lack their outputs; `outputs` are the sets to write into."""

    def read_bytes_per_s(self) -> float:
        """Return the memory's read rate right now."""


def place(device: str) -> Place:
    """Return the device `cpu`, `cuda` or `cuda:1`."""
    return Host() if device == "cpu" else Gpu(torch.device(device))


# --- a CPU ------------------------------------------------------------------------------------------------------------


class Host:
    """This machine's cores and memory."""

    timing = "calls"
    draws = True

    def __init__(self) -> None:
        self.turn = Turn()

    def resident(self, value: Tensor) -> Tensor:
        return value.clone()

    def streamed(self, value: Tensor) -> Tensor:
        """Copy to large pages: a TLB miss costs as much as the line itself."""
        return pages.clone(value)

    def output(self, value: Tensor) -> Tensor:
        return value

    def timed(self, call: Callable[..., Any], calls: Calls, outputs: Outputs = NO_OUTPUTS) -> Timed:
        return InARow(call, calls, self.turn, outputs)

    def hush(self) -> None:
        wait_until_idle()

    def read_bytes_per_s(self) -> float:
        from autosel.fingerprint.probe import read_rate

        return read_rate(torch.get_num_threads(), PROBE_S)


class Turn:
    """The next copy, the same for all arms: an arm that began at the last used copy would find it warm."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, calls: int) -> range:
        start, self.next = self.next, self.next + calls
        return range(start, start + calls)


class InARow:
    """Calls on consecutive copies, between two readings of the clock."""

    def __init__(self, call: Callable[..., Any], calls: Calls, turn: Turn, outputs: Outputs = NO_OUTPUTS) -> None:
        self.call, self.turn = call, turn
        self.by_slot = [[(*arguments, *own) for arguments in calls] for own in outputs]
        self.calls = self.by_slot[0]
        self.result: Any = None
        self.slot = 0
        self.kept: list[Any] = []

    def sample(self, calls: int, drawn: Drawn | None = None) -> float:
        slots = drawn.slots if drawn is not None else (0,) * calls
        copies, turns = len(self.calls), self.turn.take(calls)
        visits = [(self.by_slot[slot][i % copies], slot) for i, slot in zip(turns, slots, strict=True)]
        call = self.call
        results: list[Any] = [None] * len(self.by_slot)
        start = clock_ns()
        for arguments, slot in visits:
            results[slot] = call(*arguments)
        elapsed = clock_ns() - start
        self.slot = slots[-1]
        self.result = results[self.slot]
        self.kept = [results[slot] for slot in drawn.kept] if drawn is not None else []
        return elapsed / calls


# --- a GPU ------------------------------------------------------------------------------------------------------------


class Gpu:
    """One CUDA device. Everything is enqueued on its current stream."""

    timing = "graph"
    draws = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(self.device)
        self._probe: Callable[[], float] | None = None

    def resident(self, value: Tensor) -> Tensor:
        return same_layout(value, self.device)

    def streamed(self, value: Tensor) -> Tensor:
        return same_layout(value, self.device)

    def output(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def timed(self, call: Callable[..., Any], calls: Calls, outputs: Outputs = NO_OUTPUTS) -> Timed:
        return Replayed(call, [(*arguments, *outputs[0]) for arguments in calls], self.device)

    def hush(self) -> None:
        """Return at once: no thread of the host runs a kernel."""

    def read_bytes_per_s(self) -> float:
        from autosel.fingerprint.gpu_probe import reader

        if self._probe is None:
            self._probe = reader(self.device.index)
        return self._probe()


class Replayed:
    """Graphs of calls on consecutive copies, timed by events around a replay.

    A graph uses every copy equally often, so that a replay finds its first copy as cold as its last. The stream is
    blocked while events and graph are enqueued, so delays of the host are not counted. A call that cannot be captured
    (it synchronises, or allocates outside PyTorch's pools) is timed as a queue of launches.
    """

    def __init__(self, call: Callable[..., Any], calls: Calls, device: torch.device) -> None:
        self.call, self.calls, self.device, self.result = call, calls, device, None
        self.slot = 0
        self.kept: list[Any] = []
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self.results: dict[int, Any] = {}  # results of each graph's last call, in memory that the graph overwrites

    def sample(self, calls: int, drawn: Drawn | None = None) -> float:
        count = len(self.calls) * math.ceil(calls / len(self.calls))
        if count not in self.graphs:
            self.graphs[count] = self._capture(count)
        graph = self.graphs[count]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        unpin()
        torch.cuda._sleep(HELD_CYCLES)
        begin.record()
        if graph is None:
            self._queue(count)
        else:
            graph.replay()
            self.result = self.results[count]
        end.record()
        end.synchronize()
        self.kept = [self.result] if drawn is not None else []
        return float(begin.elapsed_time(end)) * 1e6 / count

    def _queue(self, count: int) -> None:
        for i in range(count):
            self.result = self.call(*self.calls[i % len(self.calls)])

    def _capture(self, count: int) -> torch.cuda.CUDAGraph | None:
        try:
            graph = captured(self._queue, count, self.device)
        except UncapturableError:
            return None
        self.results[count] = self.result
        graph.replay()  # the first replay uploads it
        torch.cuda.synchronize()
        return graph


def unpin() -> None:
    """Unpin the lines of L2 that a kernel has pinned, and remove the space for more: they would survive all data that
    passes through the cache between two samples.

    A device without such lines refuses, which has the same effect.
    """
    driver = _driver()
    if driver is not None:
        driver.cuCtxResetPersistingL2Cache()
        driver.cuCtxSetLimit(PERSISTING_L2_SIZE, ctypes.c_size_t(0))


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        return None


def same_layout(value: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy on another device: same strides, as far from a boundary of 256 bytes as it was from one of 64."""
    shift = value.data_ptr() % 64 // value.itemsize if value.numel() else 0
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    flat = torch.empty(shift + span, dtype=value.dtype, device=device)
    made = flat[shift:].as_strided(value.shape, value.stride())
    repeated = [i for i in range(value.dim()) if value.shape[i] > 1 and value.stride(i) == 0]
    source, target = value, made
    for i in repeated:  # a dimension of stride 0 is one element
        source, target = source.narrow(i, 0, 1), target.narrow(i, 0, 1)
    target.copy_(source)
    return made
