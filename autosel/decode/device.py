"""What a measurement asks of a device besides its ops: how fast memory reads, what a step and each op took, how much
was held.

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
HELD_CYCLES = 20_000  # a call: some 10 us, more than the host takes to enqueue it between two events


def current(device: str) -> AbstractContextManager[Any]:
    """The device of a plan as PyTorch's current one: libraries launch on that, wherever their operands are."""
    return nullcontext() if device == "cpu" else torch.cuda.device(torch.device(device))


def read_windows(device: str = "cpu") -> list[float]:
    """Bytes/s that memory gives just now: on a CPU in some twenty windows of about a millisecond, on a GPU the best of
    five."""
    if device != "cpu":
        return [_gpu_reader(torch.device(device).index or 0)()]
    try:
        return probe.load().read(torch.get_num_threads(), PROBE_S)
    except BuildError:  # no compiler: by numpy, a lower bound
        return [probe.read_rate(torch.get_num_threads(), PROBE_S)]


@cache
def _gpu_reader(ordinal: int) -> Callable[[], float]:
    from autosel.fingerprint.gpu_probe import reader

    return reader(ordinal)


def forget_peak(device: str) -> None:
    """Let `peak_memory` start anew from what is held now; where the system cannot, it goes on."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(torch.device(device))
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def peak_memory(device: str) -> int:
    """Bytes held at most so far."""
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
    """One step: `ns` by the clock that is certified, `host_ns` until its tokens were on the host."""

    ns: int
    host_ns: int


class StepTimer(Protocol):
    """Times one step after another: `begin`, the step is enqueued, `enqueued`, its tokens arrive, `took`."""

    by: TimedBy

    def begin(self) -> None: ...

    def enqueued(self) -> None: ...

    def took(self) -> Took: ...

    def mean_ns(self, step: Timeable, calls: int) -> float:
        """Nanoseconds of a step by this clock, over `calls` steps, each settled before the next."""


class Timeable(Protocol):
    """A written step."""

    def run(self) -> None: ...

    def settle(self) -> None: ...


def step_timer(device: str, clock: Callable[[], int]) -> StepTimer:
    return HostTimer(clock) if device == "cpu" else EventTimer(clock)


class HostTimer:
    """A CPU's step is over when its tokens are there."""

    by: TimedBy = "host"

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock, self.began = clock, 0

    def begin(self) -> None:
        self.began = self.clock()

    def enqueued(self) -> None:
        """The work is done by now."""

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
    """A GPU's step: between an event ahead of its first kernel and one behind the choice of its tokens, on the current
    stream. The stream is not held: where the host enqueues too slowly the device waits, and a user does too. Reading
    the tokens back is in the host's time alone."""

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
        """Each step is between two events, so that no pause of the host between steps is counted."""
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
    """Nanoseconds of each call of one step. On a GPU by events, all of them enqueued while the stream is held: no delay
    of the host is counted."""
    if step.logits.device.type == "cuda":
        return _by_events(step.calls, step.logits.device)
    took = []
    for call in step.calls:
        begin = clock()
        call.function(*call.arguments)
        took.append(clock() - begin)
    return took


def _by_events(calls: list[Call], device: torch.device) -> list[int]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        torch.cuda._sleep(HELD_CYCLES * len(calls))
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call.function(*call.arguments)
            mark.record()
        marks[-1].synchronize()
        return [round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(marks)]
