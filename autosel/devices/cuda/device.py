"""A GPU of CUDA as a device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from autosel.devices.cuda import drift, identity, nvml
from autosel.devices.device import (
    NO_OUTPUTS,
    READ_S,
    CallArgs,
    Ceiling,
    Device,
    Drift,
    Language,
    Outputs,
    StepTimer,
    Timed,
)
from autosel.devices.energy import Meter, board
from autosel.errors import UsageError
from autosel.native import cuda
from autosel.values import Fingerprint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from autosel.devices.cuda.timing import Marks


class Cuda(Device):
    """The GPU that CUDA numbers so in this process, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER."""

    kind = "cuda"
    noun, most, on_host = "GPU", sys.maxsize, False
    # Without a known datasheet. B200: 8 TB/s, 2.25 PFLOP/s, 126 MB.
    ceiling = Ceiling(read_bytes_per_s=3e13, flops=1e16, cache_bytes=1 << 30)
    languages = frozenset[Language]({"CUDA"})
    native = "CUDA_EXT"
    captures = True

    @property
    def torch_device(self) -> torch.device:
        """Return PyTorch's object, with a number: PyTorch needs it to make the device current."""
        import torch

        return torch.device("cuda", self.ordinal)

    def here(self) -> tuple[str, ...]:
        return _names(_cuda().device_count() if _cuda().is_available() else 0)

    def counted(self) -> tuple[str, ...]:
        return _names(nvml.count())

    def usable(self) -> bool:
        if not _has_driver():  # importing PyTorch takes a second
            return False
        return bool(_cuda().is_available()) and nvml.count() > 0

    def why_unused(self) -> str:
        if not _has_driver() or self.usable():
            return ""
        try:
            count = nvml.counted()
        except UsageError as error:  # a container may have its host's driver library without a GPU
            return f"{error.what} ({error.why}): {error.todo}" if _cuda().is_available() else ""
        return self.why_absent() if count else ""

    def why_absent(self) -> str:
        if _cuda().is_available():
            count = _cuda().device_count()
            absent = f"CUDA shows {count} device{'s' if count > 1 else ''} here, from cuda:0"
            return "" if self.ordinal < count else absent
        import torch

        if torch.version.cuda is None:
            return f"this torch ({torch.__version__}) was built without CUDA"
        return "PyTorch finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"

    def current_name(self) -> str:
        return f"cuda:{_cuda().current_device()}" if _cuda().is_available() else ""

    def unused(self) -> bool:
        """NVML counts the devices without starting CUDA, because a child forked after CUDA's start cannot use it."""
        return not _cuda().is_initialized() and bool(_cuda().device_count())

    def taking_along(self) -> Callable[[], None]:
        if not _cuda().is_initialized():
            return lambda: None
        device = _cuda().current_device()
        return lambda: _cuda().set_device(device)

    def identified(self) -> Fingerprint:
        return identity.identified(self.ordinal)

    def take(self, *, refresh: bool = False) -> Fingerprint:
        return identity.take(self.ordinal, refresh=refresh)

    def unit(self) -> str:
        return nvml.read(self.ordinal).uuid

    def read_windows(self, seconds: float = READ_S, *, within: Tensor | None = None) -> list[float]:
        """Return the best of five windows."""
        return [reader(self.ordinal)()]

    def drifted(self, fp: Fingerprint, *, seconds: float = 0.1) -> Drift:
        """Takes about 0.4 s, and needs cupy. Raises UsageError as `take` does."""
        return drift.drifted(fp, self.ordinal)

    def meter(self) -> Meter:
        return board(lambda: nvml.energy_counter(self.unit()))

    def memory(self, size_bytes: int) -> Tensor:
        """Raises CUDA's error without enough memory."""
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def current(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = _cuda().device(self.torch_device)
        return found

    def use(self) -> torch.device:
        _cuda().set_device(self.torch_device)
        return self.torch_device

    def resident(self, value: Tensor) -> Tensor:
        from autosel.devices.cuda.timing import same_layout

        return same_layout(value, self.torch_device)

    streamed = resident

    def timed(self, call: Callable[..., Any], calls: CallArgs, outputs: Outputs = NO_OUTPUTS) -> Timed:
        from autosel.devices.cuda.timing import Replayed

        return Replayed(call, [(*arguments, *outputs[0]) for arguments in calls], self.torch_device)

    def settle(self) -> None:
        _cuda().current_stream(self.torch_device).synchronize()

    def drain(self) -> None:
        _cuda().synchronize(self.torch_device)

    def timer(self, clock: Callable[[], int]) -> StepTimer:
        from autosel.devices.cuda.timing import EventTimer

        return EventTimer(clock)

    def call_spans(self, calls: Sequence[Any], clock: Callable[[], int]) -> list[tuple[int, int]]:
        """Measure by events, on a stream that is held until all are enqueued."""
        from autosel.devices.cuda.timing import call_spans

        return call_spans(calls, self.torch_device)

    def held(self) -> Marks:
        from autosel.devices.cuda.timing import held

        return held(self.torch_device)

    def capturing(self) -> bool:
        return bool(_cuda().is_current_stream_capturing())

    def captured(self, enqueue: Callable[[int], None], count: int) -> Any:
        from autosel.devices.cuda.capture import captured

        return captured(enqueue, count, self.torch_device)

    def free_bytes(self) -> int:
        return int(_cuda().mem_get_info(self.torch_device)[0])

    def own_free_bytes(self) -> int | None:
        return nvml.free_bytes(self.ordinal)

    def forget_peak(self) -> None:
        _cuda().reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        return int(_cuda().max_memory_allocated(self.torch_device))


@cache
def reader(ordinal: int) -> Callable[[], float]:
    """Return the probe of the read rate, made once a process."""
    from autosel.devices.cuda.probe import reader

    return reader(ordinal)


def _cuda() -> Any:
    import torch

    return torch.cuda


def _has_driver() -> bool:
    try:
        ctypes.CDLL(cuda.DRIVER)
    except OSError:
        return False
    return True


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{number}" for number in range(count))
