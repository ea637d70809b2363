"""Copies of operands in a GPU's memory, and times by its events. Status: not yet run on silicon."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autosel.devices.cuda.capture import captured
from autosel.devices.device import CallArgs, Drawn, StepTimer, TimedBy, Took, UncapturableError
from autosel.native.cuda import DRIVER

PERSISTING_L2_SIZE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE, cuda.h
HELD_CYCLES = 200_000  # about 0.1 ms: longer than the host needs to enqueue an arm or a graph between two events
CALL_CYCLES = 20_000  # about 10 us: longer than the host needs to enqueue one call of a step between two events


class Replayed:
    """Graphs of calls on consecutive copies, timed by events around a replay.

    A graph uses every copy equally often, so that a replay finds its first copy as cold as its last. The stream is
    blocked while events and graph are enqueued, so delays of the host are not counted. A call that cannot be captured
    (it synchronises, or allocates outside PyTorch's pools) is timed as a queue of launches.
    """

    def __init__(self, call: Callable[..., Any], calls: CallArgs, device: torch.device) -> None:
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


# --- steps and calls --------------------------------------------------------------------------------------------------


class EventTimer(StepTimer):
    """Timer of a GPU: between an event before a step's first kernel and one after the choice of its tokens.

    The events are on the current stream, which is not held: if the host enqueues too slowly, the device waits, as it
    does for a user. Reading the tokens back counts only in the host's time.
    """

    by: TimedBy = "CUDA events"

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        self.began = self.clock()
        self.first.record()

    def enqueued(self) -> None:
        self.last.record()

    def took(self) -> Took:
        host_ns = self.clock() - self.began
        self.last.synchronize()
        return Took(ns=round(self.first.elapsed_time(self.last) * 1e6), host_ns=host_ns)

    def mean_ns(self, step: Any, calls: int) -> float:
        """Return the mean over steps between two events each, without the host's pauses between steps."""
        total = 0
        for _ in range(calls):
            self.begin()
            step.run()
            self.enqueued()
            step.settle()
            total += self.took().ns
        return total / calls


def call_spans(calls: Sequence[Any], device: torch.device) -> list[tuple[int, int]]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        torch.cuda._sleep(CALL_CYCLES * len(calls))
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call.function(*call.arguments)
            mark.record()
        marks[-1].synchronize()
        took = [round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(marks)]
    return list(itertools.pairwise(itertools.accumulate(took, initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Events around the work enqueued between them, on a stream that is held meanwhile."""

    first: torch.cuda.Event
    last: torch.cuda.Event
    stream: torch.cuda.Stream

    def end(self) -> None:
        self.last.record(self.stream)

    def ns(self) -> int:
        return round(float(self.first.elapsed_time(self.last)) * 1e6)


def held(device: torch.device) -> Marks:
    """Record the first event on a held stream, as a race does, so that host delays do not count."""
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        marks = Marks(first=first, last=last, stream=torch.cuda.current_stream(device))
        torch.cuda._sleep(HELD_CYCLES)
        first.record(marks.stream)
    return marks
