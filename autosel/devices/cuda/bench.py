"""Time the kernels of kernels/cuda/probes.cu on one GPU: buffers, the gate before timed work, and rates of memory.

Rules for every figure: random data (a GPU draws less power on zeros, and clocks higher); clocks warmed up first; events
around at least 20 ms of work; five windows, the best taken and the spread kept; the queue held shut by a spinning
kernel until all that is timed is in it, so that no host delay is counted.
"""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy

from autosel import resources
from autosel.devices.cuda import rates
from autosel.devices.cuda.rates import SweepPoint
from autosel.errors import UsageError
from autosel.values import Rate

SOURCE = "cuda/probes.cu"
WINDOWS = 5
WINDOW_S = 0.02
WARM_UP_S = 0.3
SWEEP_WINDOWS, SWEEP_WINDOW_S = 3, 0.008  # of a sweep's points: five full windows for each would take four seconds
THREADS = 256
VECTOR_BYTES = 16
LINE_BYTES = 128
BLOCK_BYTES = 8 << 20  # of random data
READ_BYTES = 1 << 30  # set for measuring memory rates, if L2 is not so large as to need more
CHUNKED_BYTES = 256 << 20  # read repeatedly at a point of the sweep over L2
MOST_QUEUED = 500  # launches that a held stream accepts: beyond about 1,000 the host would wait for the gate
GATE_TICKS = 2_000_000_000  # about a second: a host that died must not block a device


@dataclass(slots=True, kw_only=True)
class ProbeBench:
    """Measure one device: its kernels, buffers and results so far. `cupy` is the module."""

    cupy: Any
    identity: Mapping[str, Any]
    rates: dict[str, Rate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kernels: Any = None
    stream: Any = None
    data: Any = None
    other: Any = None
    word: Any = None
    gate: Any = None
    ticks: Any = None

    def __post_init__(self) -> None:
        cp = self.cupy
        source = (resources.kernels() / SOURCE).read_text()
        self.kernels = cp.RawModule(code=source, options=("-std=c++17",))
        self.stream = cp.cuda.Stream(non_blocking=True)
        size = max(READ_BYTES, 8 * self.identity["l2_bytes"])
        free = cp.cuda.runtime.memGetInfo()[0]
        size = min(size, free // 4) // BLOCK_BYTES * BLOCK_BYTES
        if size == 0:
            raise UsageError(
                "the device is out of memory",
                why=f"{free / 2**20:.0f} MiB are free; its rates need {4 * BLOCK_BYTES / 2**20:.0f} at least",
                todo="end other programs there (nvidia-smi shows them)",
            )
        self.data = cp.empty(size // 4, dtype=cp.uint32)
        # Drawn by the host: cupy's generator overflows at 32 bits. For a data bus, data that repeats after 8 MiB is
        # random.
        drawn = numpy.random.default_rng(1).integers(0, 1 << 32, BLOCK_BYTES // 4, dtype=numpy.uint32)
        self.data.reshape(-1, drawn.size)[:] = cp.asarray(drawn)
        self.word = cp.zeros(1024, dtype=cp.uint32)
        self.ticks = cp.zeros(8, dtype=cp.int64)
        # Host memory that the device polls: the host opens the gate without the device's help.
        self.gate = cp.cuda.alloc_pinned_memory(64)
        for name in re.findall(r"__global__ void (\w+)", source):
            # CUDA loads a kernel at its first use, and may wait for the device to be idle. Never load while the gate is
            # shut: it would stay shut until its timeout.
            _ = self.kernels.get_function(name).num_regs
        cp.cuda.Device().synchronize()

    def release(self) -> None:
        self.data = self.other = self.word = self.ticks = None
        self.cupy.get_default_memory_pool().free_all_blocks()

    # --- timing -----------------------------------------------------------------------------------------------------

    def launch(self, name: str, blocks: int, threads: int, *args: Any, shared_bytes: int = 0) -> None:
        self.kernels.get_function(name)((blocks,), (threads,), args, shared_mem=shared_bytes, stream=self.stream)

    def seconds(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        """Return the device's seconds for the work that `work` enqueues, all of it enqueued before the first of it
        starts.

        `before` enqueues untimed work that runs first.
        """
        cp = self.cupy
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        gate = ctypes.c_uint32.from_address(self.gate.ptr)
        gate.value = 0
        self.launch("probe_gate", 1, 1, cp.uint64(self.gate.ptr), cp.int64(GATE_TICKS))
        if before is not None:
            before()
        begin.record(self.stream)
        work()
        end.record(self.stream)
        gate.value = 1
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(begin, end)) * 1e-3

    def repeated(self, work: Callable[[], None], windows: int = 0, window_s: float = 0.0) -> list[float]:
        """Return seconds of one `work` in each of five windows (or the given number) of at least 20 ms."""
        once = max(self.seconds(work), 1e-7)
        count = min(max(1, math.ceil((window_s or WINDOW_S) / once)), MOST_QUEUED)

        def often() -> None:
            for _ in range(count):
                work()

        return [self.seconds(often) / count for _ in range(windows or WINDOWS)]

    def swept(self, work: Callable[[], None]) -> float:
        """Return seconds of one `work` at a point of a sweep: the best of a few short windows."""
        return min(self.repeated(work, SWEEP_WINDOWS, SWEEP_WINDOW_S))

    def keep(self, name: str, unit: str, figures: list[float], source: str = SOURCE) -> float:
        """Store the best of some windows; rates are best when high, times when low."""
        best = min(figures) if unit == "s" else max(figures)
        spread = (max(figures) - min(figures)) / best
        told = f"best of {len(figures)} windows, {source}"
        self.rates[name] = Rate(value=best, unit=unit, spread=round(spread, 4), source=told)
        return best

    def warm_up(self) -> None:
        """Warm up for 0.3 s, because idle clocks are low."""
        until = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < until:
            self.read_all()
            self.stream.synchronize()

    @property
    def windows(self) -> int:
        return WINDOWS

    @property
    def sms(self) -> int:
        return int(self.identity["sm_count"])

    # --- memory -----------------------------------------------------------------------------------------------------

    def memory(self) -> None:
        """Measure read and copy rate, the loaded latency from the ramp, and the SMs needed to saturate memory."""
        size = self.data.nbytes
        if size < 2 * int(self.identity["l2_bytes"]):
            self.notes.append(f"little of the device's memory was free: read in {size >> 20} MiB, much of it out of L2")
        self.other = self.cupy.empty_like(self.data)
        best = 0.0
        for per_sm in (4, 8):
            found = [size / s for s in self.repeated(partial(self._read, per_sm * self.sms))]
            if max(found) > best:
                best = self.keep("read_bytes_per_s", "B/s", found)
        self.keep("copy_bytes_per_s", "B/s", [2 * size / s for s in self.repeated(self._copy)])
        ramp = list(self._ramp())
        try:
            latency = rates.loaded_latency_s(ramp, best)
        # for example, memory too fast for one load per thread; every formula needs the figure
        except ValueError as error:
            latency = rates.latency_beside_s(ramp, best)
            self.notes.append(f"the loaded latency is taken from the ramp's nearest point: {error}")
        self.keep("dram_latency_s", "s", [latency])
        # one block per SM reading DRAM
        by_count = [SweepPoint(size=n, value=size / self.swept(partial(self._read, n))) for n in self._sm_counts()]
        self.keep("saturating_sms", "count", [float(rates.sms_to_saturate(by_count))])

    def best_read(self, windows: int = WINDOWS, window_s: float = WINDOW_S) -> float:
        reads = (partial(self._read, n * self.sms) for n in (4, 8))
        return max(float(self.data.nbytes) / s for read in reads for s in self.repeated(read, windows, window_s))

    def read_all(self) -> None:
        self._read(8 * self.sms)

    def _read(self, blocks: int) -> None:
        count = self.cupy.uint64(self.data.nbytes // VECTOR_BYTES)
        self.launch("probe_read", blocks, THREADS, self.data, count, self.word)

    def _copy(self) -> None:
        count = self.cupy.uint64(self.data.nbytes // VECTOR_BYTES)
        self.launch("probe_copy", 8 * self.sms, THREADS, self.other, self.data, count)

    def _ramp(self) -> Iterator[SweepPoint]:
        """Return (bytes in flight, bytes/s): one load per thread; resident threads set by the number of blocks per
        SM."""
        most = min(int(self.identity["threads_per_sm"]) // 64, int(self.identity["ctas_per_sm"]))
        from_memory = 4 * int(self.identity["l2_bytes"])  # a smaller set would come out of L2 the second time
        for per_sm in [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32) if n <= most]:
            blocks = per_sm * self.sms
            # Unused shared memory keeps the scheduler from placing more than per_sm blocks on one SM.
            room = min(int(self.identity["smem_per_sm_bytes"]) // per_sm - 2048, 48 << 10)
            size = min(self.data.nbytes, max(blocks * 64 * VECTOR_BYTES * 512, from_memory))
            count = self.cupy.uint64(size // VECTOR_BYTES)

            def work(blocks: int = blocks, room: int = room, count: Any = count) -> None:
                self.launch("probe_read_one", blocks, 64, self.data, count, self.word, shared_bytes=max(room, 0))

            yield SweepPoint(size=blocks * 64 * VECTOR_BYTES, value=int(count) * VECTOR_BYTES / self.swept(work))

    def _sm_counts(self) -> list[int]:
        return sorted({max(1, round(self.sms * k / 8)) for k in range(1, 9)})

    # --- caches -----------------------------------------------------------------------------------------------------

    def cache(self) -> None:
        """Measure L2: rate on the plateau, its usable size, and the share of its rate that one SM can draw."""
        l2 = int(self.identity["l2_bytes"])
        sizes = [int(l2 * f) for f in (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1, 1.5, 2, 4)]
        blocks = 2 * self.sms
        sweep = [
            SweepPoint(size=size, value=self._chunk_rate(size, blocks=blocks, chunks=max(1, blocks // 2)))
            for size in sizes
            if size <= self.data.nbytes
        ]
        self.keep("l2_bytes_per_s", "B/s", [rates.l2_bytes_per_s(sweep)])
        self.keep("l2_effective_bytes", "B", [rates.effective_l2_bytes(sweep)])
        resident = min(l2 // 4, self.data.nbytes)
        drawn = [self._chunk_rate(resident, blocks=n, chunks=n) / n for n in self._sm_counts()]
        self.keep("sm_bytes_per_s", "B/s", [max(drawn)])

    def _chunk_rate(self, size: int, *, blocks: int, chunks: int) -> float:
        """Return bytes/s of so many blocks that repeatedly read a set of `size` bytes, cut into chunks that they
        share."""
        cp = self.cupy
        count = max(1, size // chunks // VECTOR_BYTES)
        passes = max(2, CHUNKED_BYTES // (count * VECTOR_BYTES * blocks))

        def work() -> None:
            sizes = (cp.uint64(count), cp.uint32(chunks), cp.uint32(passes))
            self.launch("probe_chunks", blocks, 512, self.data, *sizes, self.word)

        return count * VECTOR_BYTES * passes * blocks / self.swept(work)

    def latency(self) -> None:
        """Measure unloaded latencies by pointer chase, and the clock under load for their conversion."""
        clock = self._clock_hz()
        self.keep("sm_clock_hz", "Hz", [clock])
        l2 = int(self.identity["l2_bytes"])
        sets = {"l1": 64 << 10, "l2": min(8 << 20, l2 // 2), "l2_far": int(0.8 * l2), "idle_dram": self.data.nbytes}
        for level, size in sets.items():
            if size <= self.data.nbytes:
                self.keep(f"{level}_latency_s", "s", [self._chase(size) / clock])

    def _clock_hz(self) -> float:
        """Return ticks over the time by events, while all SMs are busy."""
        cp, wanted = self.cupy, 20_000_000

        def work() -> None:
            self.launch("probe_clock", self.sms, THREADS, cp.int64(wanted), self.ticks)

        seconds = [self.seconds(work) for _ in range(WINDOWS)]
        return wanted / min(seconds)

    def _chase(self, size: int) -> float:
        """Return ticks per load: one thread on a random cycle over the 128-byte lines of `size` bytes.

        The second walk continues where the first has ended: in a long set, over new lines; in a short one, around it so
        often that the first round, with L1 empty as in every kernel, does not count.
        """
        cp, lines = self.cupy, size // LINE_BYTES
        order = numpy.random.default_rng(2).permutation(lines).astype(numpy.uint32)  # cupy's generator has none
        following = numpy.empty(lines, dtype=numpy.uint32)
        following[order] = numpy.roll(order, -1)
        self.data[: lines * 32 : 32] = cp.asarray(following)
        self.word[:] = 0  # where the walk begins
        cp.cuda.Device().synchronize()  # the data was written on another stream
        steps = 4096 if lines > 4096 else 64 * 32 * math.ceil(lines / 32)

        def work() -> None:
            self.launch("probe_chase", 1, 1, self.data, cp.uint32(steps), self.ticks, self.word)

        self.seconds(work)
        self.seconds(work)
        return float(self.ticks[0].get()) / steps
