"""Measurements of a device other than its ops: read rate of memory, times of steps and ops, peak memory.

Status of the GPU's half: not yet run on silicon.
"""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from autosel.decode.step import Call, Step
from autosel.errors import BuildError
from autosel.fingerprint import probe

PROBE_S = 0.02
HELD_CYCLES = 20_000  # per call: about 10 us, more than the host needs to enqueue it between two events


def current(device: str) -> AbstractContextManager[Any]:
    """Make the plan's device PyTorch's current one: libraries launch there, wherever their operands are."""
    return nullcontext() if device == "cpu" else torch.cuda.device(torch.device(device))


def read_windows(device: str = "cpu") -> list[float]:
    """Return the current read rates of memory in bytes/s.

    On a CPU about twenty windows of a millisecond; on a GPU the best of five.
    """
    if device != "cpu":
        return [_gpu_reader(torch.device(device).index or 0)()]
    try:
        return probe.load().read(torch.get_num_threads(), PROBE_S)
    except BuildError:  # without a compiler: numpy's rate, a lower bound
        return [probe.read_rate(torch.get_num_threads(), PROBE_S)]


@cache
def _gpu_reader(ordinal: int) -> Callable[[], float]:
    from autosel.fingerprint.gpu_probe import reader

    return reader(ordinal)


def forget_peak(device: str) -> None:
    """Reset `peak_memory` to the current use. If the system cannot, the old peak remains."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(torch.device(device))
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def peak_memory(device: str) -> int:
    """Return the peak memory so far, in bytes."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated(torch.device(device)))
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


# --- whole steps -----------------------------------------------------------------------------------------------------

TimedBy = Literal["host", "CUDA events"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Times of one step: `ns` by the certified clock, `host_ns` until its tokens are on the host."""

    ns: int
    host_ns: int


class StepTimer(Protocol):
    """Timer of single steps. Order: `begin`, enqueue the step, `enqueued`, its tokens arrive, `took`."""

    by: TimedBy

    def begin(self) -> None: ...

    def enqueued(self) -> None: ...

    def took(self) -> Took: ...

    def mean_ns(self, step: Timeable, calls: int) -> float:
        """Return nanoseconds per step by this clock, over `calls` steps, each settled before the next."""


class Timeable(Protocol):
    """A written step."""

    def run(self) -> None: ...

    def settle(self) -> None: ...


def step_timer(device: str, clock: Callable[[], int]) -> StepTimer:
    return HostTimer(clock) if device == "cpu" else EventTimer(clock)


class HostTimer:
    """Timer of a CPU: its step ends when the tokens are available."""

    by: TimedBy = "host"

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock, self.began = clock, 0

    def begin(self) -> None:
        self.began = self.clock()

    def enqueued(self) -> None:
        """Do nothing: the work is already done."""

    def took(self) -> Took:
        ns = self.clock() - self.began
        return Took(ns=ns, host_ns=ns)

    def mean_ns(self, step: Timeable, calls: int) -> float:
        self.begin()
        for _ in range(calls):
            step.run()
            step.settle()
        return self.took().ns / calls


class EventTimer:
    """Timer of a GPU: between an event before a step's first kernel and one after the choice of its tokens.

    The events are on the current stream, which is not held: if the host enqueues too slowly, the device waits, as it
    does for a user. Reading the tokens back counts only in the host's time.
    """

    by: TimedBy = "CUDA events"

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock, self.began = clock, 0
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

    def mean_ns(self, step: Timeable, calls: int) -> float:
        """Return the mean over steps between two events each, without the host's pauses between steps."""
        total = 0
        for _ in range(calls):
            self.begin()
            step.run()
            self.enqueued()
            step.settle()
            total += self.took().ns
        return total / calls


# --- single ops ------------------------------------------------------------------------------------------------------


def time_calls(step: Step, clock: Callable[[], int]) -> list[int]:
    """Return nanoseconds of each call of one step."""
    return [end - begin for begin, end in call_spans(step, clock)]


def call_spans(step: Step, clock: Callable[[], int]) -> list[tuple[int, int]]:
    """Return begin and end of each call of one step, in nanoseconds since the step began.

    On a GPU events measure them while the stream is held until all are enqueued, so that no delay of the host counts.
    """
    if step.logits.device.type == "cuda":
        return _by_events(step.calls, step.logits.device)
    spans, started = [], clock()
    for call in step.calls:
        begin = clock()
        call.function(*call.arguments)
        end = clock()
        spans.append((begin - started, end - started))
    return spans


def _by_events(calls: list[Call], device: torch.device) -> list[tuple[int, int]]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        torch.cuda._sleep(HELD_CYCLES * len(calls))
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call.function(*call.arguments)
            mark.record()
        marks[-1].synchronize()
        took = [round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(marks)]
    return list(itertools.pairwise(itertools.accumulate(took, initial=0)))
