"""The host as a device."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosel.devices.cpu import drift, identity, machine, probe
from autosel.devices.cpu.timing import InARow
from autosel.devices.device import NO_OUTPUTS, READ_S, CallArgs, Ceiling, Device, Drift, Language, Outputs, Timed
from autosel.devices.energy import Meter, packages
from autosel.errors import BuildError
from autosel.values import Backend, Fingerprint
from autosel.workers import pages

if TYPE_CHECKING:
    from torch import Tensor


class Cpu(Device):
    """The cores of this machine."""

    kind = "cpu"
    noun, most, on_host = "CPU", 1, True
    ceiling = Ceiling(read_bytes_per_s=4e12, flops=5e14, cache_bytes=4 << 30)  # of a whole machine
    languages = frozenset[Language]({"C++"})
    native = "CPP"
    interpreted = frozenset[Backend]({"TRITON", "LIGER"})
    next = 0  # copy of operands that the next timed call reads

    def identified(self) -> Fingerprint:
        return identity.identified()

    def take(self, *, refresh: bool = False) -> Fingerprint:
        return identity.take(refresh=refresh)

    def read_windows(self, seconds: float = READ_S, *, within: Tensor | None = None) -> list[float]:
        """Return the rates of windows of a millisecond, at least three.

        The end of `within` is read if it is large enough that the rest is not in a cache afterwards, else a buffer of
        the process.
        """
        import torch

        try:
            place = None if within is None else (within.data_ptr(), within.nbytes)
            return probe.load().read(torch.get_num_threads(), seconds, place)
        except BuildError:  # without a compiler: numpy's rate, a lower bound
            return [probe.read_without_compiler(torch.get_num_threads(), seconds)]

    def drifted(self, fp: Fingerprint, *, seconds: float = 0.1) -> Drift:
        """Raises BuildError without a compiler for the probes."""
        return drift.drifted(fp, seconds)

    def meter(self) -> Meter:
        return packages()

    def memory(self, size_bytes: int) -> Tensor:
        import torch

        return pages.empty((max(size_bytes, 1),), torch.uint8)

    def resident(self, value: Tensor) -> Tensor:
        return value.clone()

    def streamed(self, value: Tensor) -> Tensor:
        """Copy to large pages: a TLB miss costs as much as the line itself."""
        return pages.clone(value)

    def timed(self, call: Callable[..., Any], calls: CallArgs, outputs: Outputs = NO_OUTPUTS) -> Timed:
        return InARow(call, calls, self._turn, outputs)

    def _turn(self, calls: int) -> range:
        """Return the next copies, the same for all arms: one that began at the last used copy would find it warm."""
        start, self.next = self.next, self.next + calls
        return range(start, start + calls)

    def free_bytes(self) -> int:
        return machine.free_memory()

    def forget_peak(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

    def peak_bytes(self) -> int:
        with suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
