"""The interface of a device, with what holds on the host, and the values that it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from autosel.values import Backend, DeviceKind, Fingerprint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from autosel.devices.energy import Meter

Language = Literal["C++", "CUDA"]  # CUDA stands also for Triton and for libraries of CUDA kernels
TimedBy = Literal["host", "CUDA events"]
CallArgs = Sequence[tuple[Any, ...]]  # arguments of each of an arm's calls, one for each copy of its operands
Outputs = Sequence[tuple[Any, ...]]  # sets of outputs, None for an arm that allocates its own
NO_OUTPUTS: Outputs = ((),)
READ_S = 0.02  # of a read probe
DRIFT_LIMIT = 0.07  # of a rate, in all looks
LOOKS = 3


class UncapturableError(Exception):
    """The called function does something that a capture forbids: it waits for the device, or allocates past PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Compare today's rates with the stored ones: ratios above 1 are better than stored."""

    read: float
    start: float
    what: str  # what `start` measures, in words
    moved: bool  # one of them off by more than the limit in every measurement
    shared: bool  # others use the device too, or it is throttled: then a drift depends on them, not on the device
    seconds: float

    @property
    def reason(self) -> str:
        return f"read rate {self.read:.2f}x and {self.what} speed {self.start:.2f}x of the stored rate"


def off(ratios: list[float]) -> bool:
    """Return True for a rate that has moved: every measurement is off by more than the limit."""
    return all(abs(r - 1) > DRIFT_LIMIT for r in ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Limits that no device of a kind exceeds, to check the figures of certificates."""

    read_bytes_per_s: float
    flops: float
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """`slots`: the outputs of each call, by number; `kept`: those with the kept calls' results, the last call's at the
    end.
    """

    slots: Sequence[int]
    kept: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Times of one step: `ns` by the certified clock, `host_ns` until its tokens are on the host."""

    ns: int
    host_ns: int


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


class StepTimer:
    """Timer of single steps. Order: `begin`, enqueue the step, `enqueued`, its tokens arrive, `took`.

    On the host, a step ends when the tokens are available.
    """

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

    def mean_ns(self, step: Any, calls: int) -> float:
        """Return nanoseconds per step by this clock, over `calls` steps, each settled before the next."""
        self.begin()
        for _ in range(calls):
            step.run()
            step.settle()
        return self.took().ns / calls


class Device(ABC):
    """One device of this machine, present or not. Attributes hold for every device of the kind.

    Members that are not abstract do what the host needs, which is mostly nothing.
    """

    # --- identity ----------------------------------------------------------------------------------------------------

    kind: DeviceKind
    noun: str  # CPU, GPU
    most: int  # devices of this kind that a machine can have
    ceiling: Ceiling

    def __init__(self, ordinal: int | None = None) -> None:
        """`cpu`, `cuda` have no number; workers treat the memory of `cpu:0` as another device's, for tests."""
        self.ordinal, self.shared = ordinal or 0, self.on_host and ordinal is None

    def here(self) -> tuple[str, ...]:
        """Return the devices of this kind that PyTorch can use."""
        return (self.kind,)

    def counted(self) -> tuple[str, ...]:
        """Return the devices of this kind that can be identified here."""
        return (self.kind,)

    def usable(self) -> bool:
        """Return True if PyTorch and the fingerprint can use a device of this kind here."""
        return True

    def why_unused(self) -> str:
        """Return why a device of this kind that is here is not usable, or ""."""
        return ""

    def why_absent(self) -> str:
        """Return why PyTorch does not have this device, or ""."""
        return ""

    def current_name(self) -> str:
        """Return the device of this kind on which this thread works, or ""."""
        return self.kind

    def unused(self) -> bool:
        """Return True if there is a device of this kind, and this process has used none. Starts none."""
        return False

    def taking_along(self) -> Callable[[], None]:
        """Return a function that makes this thread's current device the current one of another thread."""
        return lambda: None

    @abstractmethod
    def identified(self) -> Fingerprint:
        """Return the identity alone, without measuring. Raises UsageError for a device that is missing."""

    @abstractmethod
    def take(self, *, refresh: bool = False) -> Fingerprint:
        """Return the fingerprint: identity and environment read now, rates measured or stored."""

    def unit(self) -> str:
        """Distinguish equal devices of this machine: a GPU's UUID; empty for the single CPU."""
        return ""

    # --- probes ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def read_windows(self, seconds: float = READ_S, *, within: Tensor | None = None) -> list[float]:
        """Return the current read rates of memory in bytes/s. A GPU's takes as long as it needs."""

    @abstractmethod
    def drifted(self, fp: Fingerprint, *, seconds: float = 0.1) -> Drift:
        """Check the stored rates. `seconds`: duration on a CPU; a GPU takes about as long and 0.3 s more."""

    @abstractmethod
    def meter(self) -> Meter:
        """Return a meter of energy; if there is none, a meter that says why."""

    # --- placement ---------------------------------------------------------------------------------------------------

    shared: bool  # kernels reach the memory that workers share

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.kind)

    def use(self) -> torch.device:
        """Make the device PyTorch's current one for good; return PyTorch's object."""
        return self.torch_device

    def current(self) -> AbstractContextManager[Any]:
        """Make the device PyTorch's current one: libraries launch there, wherever their operands are."""
        return nullcontext()

    @abstractmethod
    def memory(self, size_bytes: int) -> Tensor:
        """Return uint8 [size_bytes]: zeros in untouched pages on a CPU, uninitialised on a GPU."""

    @abstractmethod
    def resident(self, value: Tensor) -> Tensor:
        """Return a private copy of an operand that is warm."""

    @abstractmethod
    def streamed(self, value: Tensor) -> Tensor:
        """Return a private copy of an operand that must be cold: same strides, same distance from a boundary."""

    # --- synchronisation and timing ----------------------------------------------------------------------------------

    on_host: bool  # kernels run on this process's threads, and a call returns when its work is done

    def settle(self) -> None:  # noqa: B027
        """Wait for the work on the current stream."""

    def drain(self) -> None:  # noqa: B027
        """Wait for all work. Raises the device's error."""

    @abstractmethod
    def timed(self, call: Callable[..., Any], calls: CallArgs, outputs: Outputs = NO_OUTPUTS) -> Timed:
        """Return the calls of an arm, ready to be timed. They lack their outputs; `outputs` are the sets to write into.

        With several sets, the calls of a sample can have separate outputs; only the host has several.
        """

    def timer(self, clock: Callable[[], int]) -> StepTimer:
        return StepTimer(clock)

    def call_spans(self, calls: Sequence[Any], clock: Callable[[], int]) -> list[tuple[int, int]]:
        """Return begin and end of each of a step's calls, which run once, in nanoseconds since the step began."""
        spans, started = [], clock()
        for call in calls:
            begin = clock()
            call.function(*call.arguments)
            end = clock()
            spans.append((begin - started, end - started))
        return spans

    def held(self) -> Any:
        """Begin to time work by the device's clock until `end()`, then `ns()`; None if the host's clock times it."""
        return None

    # --- capture -----------------------------------------------------------------------------------------------------

    captures = False  # calls can be captured once and replayed

    def capturing(self) -> bool:
        """Return True during a capture, in which nothing can be awaited or compared."""
        return False

    def captured(self, enqueue: Callable[[int], None], count: int) -> Any:
        """Return the graph of the work that `enqueue(count)` enqueues. Raises UncapturableError, or a call's error."""
        raise UncapturableError(f"a {self.noun} has no graphs")

    # --- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes that are free without evicting other processes."""

    def own_free_bytes(self) -> int | None:
        """Return the free bytes of memory that is not the host's, without starting the device; None if unknown."""
        return None

    @abstractmethod
    def forget_peak(self) -> None:
        """Reset `peak_bytes` to the current use. If the system cannot, the old peak remains."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the peak memory so far."""

    # --- what can run ------------------------------------------------------------------------------------------------

    languages: frozenset[Language]  # of the kernels that run on it
    native: Backend  # of autosel's compiled kernels
    interpreted: frozenset[Backend] = frozenset()  # run by an interpreter, which is not safe in two threads at once
