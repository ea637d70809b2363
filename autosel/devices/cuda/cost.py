"""Measure the overheads of a kernel: starting it, barriers, the host's part, and copies to and from the host.

Each figure follows the rules of bench.py; the host's times use the host's clock.

Status: compiled and emulated; not yet run on silicon.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from autosel import resources
from autosel.devices.cuda import rates
from autosel.devices.cuda.bench import ProbeBench
from autosel.devices.cuda.rates import SweepPoint
from autosel.native.cuda import DRIVER

GRID_SYNC = "cuda/grid_sync.cu"
CHAIN = (100, 1000)  # nodes of two graphs: their common cost cancels
READS = 200  # nodes of a graph that each read a separate piece of memory
PIECES = tuple(kib << 10 for kib in (64, 256, 512, 1024, 2048, 3072))  # bytes; RRZE-HPC's gpu-benches, small kernels
COPIED_BYTES = 64 << 20
ANSWERS = 50  # of four bytes each, in one of the host's windows


def measure(bench: ProbeBench) -> None:
    """Measure a kernel on a stream, in a graph, behind a dependent launch; barriers; the host's launch; copies to and
    from the host."""
    bench.keep("stream_launch_s", "s", each(bench, partial(_tiny, bench), 50, 500))
    chain = graph_chain(bench)
    bench.keep("graph_node_s", "s", each(bench, chain, *CHAIN))
    bench.keep("flag_barrier_s", "s", each(bench, partial(barriers, bench), 50, 500))
    synced = _grid_sync(bench)
    if synced is not None:
        bench.keep("grid_sync_s", "s", each(bench, synced, 50, 500), GRID_SYNC)
    pdl = _dependent(bench)
    if pdl is not None:
        bench.keep("pdl_node_s", "s", each(bench, pdl, 50, 500))
    # A barrier that costs as much as a dependent launch saves nothing: stored as a nanosecond, because no stored rate
    # is 0.
    pdl_s = bench.rates["pdl_node_s"].value if pdl is not None else 0.0
    bench.keep("persistent_saving_s", "s", [max(pdl_s - bench.rates["flag_barrier_s"].value, 1e-9)])
    floor = list(_small_reads(bench))
    if len(floor) > 1:
        bench.keep("read_floor_s", "s", [max(rates.floor_s(floor), 1e-9)])
    bench.keep("host_launch_s", "s", [_host_launch(bench) for _ in range(bench.windows)])
    _to_the_host(bench)


def each(bench: ProbeBench, run: Callable[[int], None], few: int, many: int, *, windows: int = 0) -> list[float]:
    """Return seconds per item in each window, from two counts, so that the common cost cancels."""
    counted = range(windows or bench.windows)
    times = [(bench.seconds(lambda: run(few)), bench.seconds(lambda: run(many))) for _ in counted]
    return [max(rates.per_item_s((few, a), (many, b)), 1e-9) for a, b in times]


# --- starting --------------------------------------------------------------------------------------------------------


def _tiny(bench: ProbeBench, count: int) -> None:
    for _ in range(count):
        bench.launch("probe_tiny", 1, 32, bench.word)


def graph_chain(bench: ProbeBench) -> Callable[[int], None]:
    """Launch a chain of so many nodes (one of CHAIN), captured beforehand."""

    def tiny(count: int, stream: Any) -> None:
        for _ in range(count):
            bench.kernels.get_function("probe_tiny")((1,), (32,), (bench.word,), stream=stream)

    graphs = {count: _captured(bench, partial(tiny, count)) for count in CHAIN}
    return lambda count: graphs[count].launch(bench.stream)


def _captured(bench: ProbeBench, work: Callable[[Any], None]) -> Any:
    """Return a graph of the work that `work` enqueues on a stream, launched once, because the first launch uploads
    it."""
    side = bench.cupy.cuda.Stream(non_blocking=True)
    side.begin_capture()
    work(side)
    graph = side.end_capture()
    graph.launch(bench.stream)
    bench.stream.synchronize()
    return graph


def _small_reads(bench: ProbeBench) -> Iterator[SweepPoint]:
    """Return (bytes, seconds) of a kernel that reads so much from DRAM, as nodes of a graph with a separate piece each.

    Between windows the whole buffer is read from end to end, so that the pieces at the start have left L2.
    """
    vector, whole = 16, bench.data.nbytes
    for size in [s for s in PIECES if 2 * s <= whole]:
        count = min(READS, whole // 2 // size)

        def reads(stream: Any, size: int = size, count: int = count) -> None:
            blocks = min(8 * bench.sms, -(-size // (vector * 256)))
            for i in range(count):
                piece = bench.data[i * size // 4 : (i + 1) * size // 4]
                args = (piece, bench.cupy.uint64(size // vector), bench.word)
                bench.kernels.get_function("probe_read")((blocks,), (256,), args, stream=stream)

        graph = _captured(bench, reads)
        flushed = partial(bench.seconds, partial(graph.launch, bench.stream), before=bench.read_all)
        yield SweepPoint(size=size, value=min(flushed() for _ in range(bench.windows)) / count)


# --- meeting ---------------------------------------------------------------------------------------------------------


def barriers(bench: ProbeBench, rounds: int) -> None:
    bench.cupy.cuda.runtime.memsetAsync(bench.word.data.ptr, 0, 4, bench.stream.ptr)
    bench.launch("probe_barrier", bench.sms, 128, bench.word, bench.cupy.uint32(rounds))


def _grid_sync(bench: ProbeBench) -> Callable[[int], None] | None:
    """Measure the barrier of cooperative groups; None if this toolkit, or cupy, lacks what compiles it."""
    try:
        source = (resources.kernels() / GRID_SYNC).read_text()
        module = bench.cupy.RawModule(code=source, options=("-std=c++17",), enable_cooperative_groups=True)
        kernel = module.get_function("probe_grid_sync")
        _ = kernel.num_regs
    except Exception as error:  # a header, a device library, a linker: no formula reads the figure, so nothing is lost
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        bench.notes.append(f"no grid_sync_s: {why}")
        return None
    return lambda rounds: kernel((bench.sms,), (128,), (bench.cupy.uint32(rounds),), stream=bench.stream)


def _dependent(bench: ProbeBench) -> Callable[[int], None] | None:
    """Measure a chain of programmatic dependent launches, by the driver's own call; None before compute capability
    9.0."""
    if float(bench.identity["cc"]) < 9.0:
        return None
    function = bench.kernels.get_function("probe_tiny_dependent").kernel.ptr
    return lambda count: launch_dependent(function, bench.stream.ptr, bench.word.data.ptr, count)


# --- the host --------------------------------------------------------------------------------------------------------


def _host_launch(bench: ProbeBench) -> float:
    """Return the host's seconds for one launch through cupy, with the queue never full."""
    bench.stream.synchronize()
    started = time.perf_counter()
    _tiny(bench, 200)
    seconds = (time.perf_counter() - started) / 200
    bench.stream.synchronize()
    return seconds


def _to_the_host(bench: ProbeBench) -> None:
    """Measure rates of pinned copies in both directions, and the host's time for an answer of four bytes, such as a
    token."""
    runtime = bench.cupy.cuda.runtime
    size = min(COPIED_BYTES, bench.data.nbytes)
    pinned, device = bench.cupy.cuda.alloc_pinned_memory(size), bench.data.data.ptr
    out = (pinned.ptr, device, size, runtime.memcpyDeviceToHost, bench.stream.ptr)
    back = (device, pinned.ptr, size, runtime.memcpyHostToDevice, bench.stream.ptr)  # the copied data: still random
    for name, copy in (("from_device_bytes_per_s", out), ("to_device_bytes_per_s", back)):
        bench.keep(name, "B/s", [size / s for s in bench.repeated(partial(runtime.memcpyAsync, *copy))])

    def answered() -> float:
        started = time.perf_counter()
        for _ in range(ANSWERS):
            runtime.memcpyAsync(pinned.ptr, device, 4, runtime.memcpyDeviceToHost, bench.stream.ptr)
            bench.stream.synchronize()
        return (time.perf_counter() - started) / ANSWERS

    bench.stream.synchronize()
    bench.keep("host_answer_s", "s", [answered() for _ in range(bench.windows)])


# --- programmatic dependent launch ------------------------------------------------------------------------------------

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID, cuda.h


class _Attribute(ctypes.Structure):
    """Match CUlaunchAttribute: id, padding to 8, a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """Match CUlaunchConfig."""

    _fields_ = [
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def launch_dependent(function: int, stream: int, pointer: int, count: int) -> None:
    """Enqueue `count` launches, each allowed to start before the previous one has ended. Raises OSError."""
    driver = ctypes.CDLL(DRIVER)
    attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = _Config(grid_x=1, grid_y=1, grid_z=1, block_x=32, block_y=1, block_z=1)
    config.stream, config.attribute_count = stream, 1
    config.attributes = ctypes.pointer(attribute)
    argument = ctypes.c_void_p(pointer)
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p))
    for _ in range(count):
        failed = driver.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), arguments, None)
        if failed:
            raise OSError(f"cuLaunchKernelEx: CUDA error {failed}")
