"""Provide the part of cupy that autosel's probes use, on this CPU: NumPy's arrays, and kernels on emulated threads.

It has only names that cupy 14 has. cupy has neither `Generator.permutation` nor an attribute for the compute
capability, so using one fails here as with cupy.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

ATTRIBUTES = {  # properties of the simulated device: simt.h's, and an H100's
    "cudaDevAttrMultiProcessorCount": 2,
    "cudaDevAttrL2CacheSize": 2 << 20,
    "cudaDevAttrMaxRegistersPerMultiprocessor": 65536,
    "cudaDevAttrMaxSharedMemoryPerMultiprocessor": 233472,
    "cudaDevAttrMaxSharedMemoryPerBlockOptin": 232448,
    "cudaDevAttrMaxThreadsPerMultiProcessor": 512,
    "cudaDevAttrMaxBlocksPerMultiprocessor": 32,
}
FREE_BYTES = 32 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class _Default:
    """CUDA's default stream, on which cupy writes arrays: a non-blocking stream does not wait for it."""

    busy = False


class Array(numpy.ndarray):
    """Act like cupy's array: elements are 0-d arrays, `data.ptr` is the address, `get()` a copy on the host."""

    def __setitem__(self, index: Any, value: Any) -> None:
        _Default.busy = True
        super().__setitem__(index, value)

    def __getitem__(self, index: Any) -> Any:
        return numpy.asarray(super().__getitem__(index)).view(Array)

    def get(self) -> Any:
        return numpy.array(self)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def _made(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any, **named: Any) -> Any:
        _Default.busy |= function not in (numpy.empty, numpy.empty_like)
        return function(*given, **named).view(Array)

    return made


class CUDARuntimeError(RuntimeError):
    pass


class Kernel:
    """Act like cupy.RawKernel: `(grid, block, args, shared_mem=, stream=)`."""

    def __init__(self, library: ctypes.CDLL, name: str, loaded: set[str]) -> None:
        self.library, self.name, self.loaded = library, name, loaded
        self.kernel = SimpleNamespace(ptr=id(self))

    @property
    def num_regs(self) -> int:
        self.loaded.add(self.name)
        return 32

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0, stream: Any
    ) -> None:
        if stream.captured is not None:
            stream.captured.append(lambda: self.launch(grid, block, args, shared_mem))
        else:
            self.launch(grid, block, args, shared_mem)

    def launch(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared: int) -> None:
        assert self.name in self.loaded, f"{self.name}: what CUDA loads at a launch may wait for a gate that is shut"
        assert not _Default.busy, f"{self.name}: missing wait for writes of the default stream"
        held = [numpy.uint64(a.data.ptr) if isinstance(a, Array) else a for a in args]
        assert all(isinstance(a, numpy.generic) for a in held), f"{self.name}: cupy makes 8 bytes of a plain number"
        places = [numpy.array(a) for a in held]
        count = len(places)
        values = (ctypes.c_void_p * count)(*(p.ctypes.data for p in places))
        sizes = (ctypes.c_size_t * count)(*(p.nbytes for p in places))
        self.library.launch.restype = ctypes.c_char_p
        said = self.library.launch(
            self.name.encode(), *grid, *block, ctypes.c_size_t(shared), values, sizes, ctypes.c_size_t(count)
        )
        if said:
            raise CUDARuntimeError(f"{self.name}: {said.decode()}")


class Stream:
    ptr = 1

    def __init__(self, *, non_blocking: bool = False) -> None:
        self.captured: list[Callable[[], None]] | None = None

    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> Any:
        calls, self.captured = self.captured, None
        assert calls is not None

        def launch(stream: Stream) -> None:
            for call in calls:
                call()

        return SimpleNamespace(launch=launch)


class Event:
    def record(self, stream: Stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...


class HostEvent:
    """Act like PyTorch's event; complete when recorded, because threads of this CPU finish earlier work first."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) / 1e6


class Device:
    def __init__(self, ordinal: int = 0) -> None:
        self.id = ordinal

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None:
        _Default.busy = False


def _attribute(number: int, ordinal: int) -> int:
    return list(ATTRIBUTES.values())[number]


def _set(pointer: int, value: int, count: int, stream: int) -> None:
    ctypes.memset(pointer, value, count)


def _copy(to: int, start: int, count: int, kind: int, stream: int) -> None:
    assert kind in (HOST_TO_DEVICE, DEVICE_TO_HOST)
    ctypes.memmove(to, start, count)


def _module(library: ctypes.CDLL, loaded: set[str], code: str, cooperative: bool) -> Any:
    """Act like cupy.RawModule: kernels of this source only. A kernel that waits for the whole grid is launched
    cooperatively."""
    assert ("cooperative_groups" in code) == cooperative
    names = re.findall(r"__global__ void (\w+)", code)

    def get_function(name: str) -> Kernel:
        if name not in names:
            raise CUDARuntimeError(f"CUDA_ERROR_NOT_FOUND: {name}")
        return Kernel(library, name, loaded)

    return SimpleNamespace(get_function=get_function)


UUIDS = {"0000:0a:00.0": bytes(range(1, 17)), "0000:0b:00.0": bytes(range(17, 33))}  # of nvml_stand_in.c
BOARDS = tuple(UUIDS)


def modules(
    library: Path, *, devices: int = 1, boards: tuple[str, ...] = BOARDS[:1], uuid: bytes = b""
) -> dict[str, ModuleType]:
    """Return `cupy`, `cupy.cuda` and `cupy.cuda.runtime`, for sys.modules. `boards`: PCI addresses of CUDA's devices,
    in its order; `uuid` replaces each device's own."""
    devices = max(devices, len(boards)) if boards else 0
    library_ = ctypes.CDLL(str(library))
    cupy, cuda, runtime = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
    vars(runtime).update(
        {name: number for number, name in enumerate(ATTRIBUTES)},
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: devices,
        deviceGetAttribute=_attribute,
        deviceGetPCIBusId=lambda ordinal: boards[ordinal],
        getDeviceProperties=lambda ordinal: {
            "major": 9,
            "minor": 0,
            "uuid": (uuid or UUIDS[boards[ordinal]]).partition(b"\0")[0],
            "totalGlobalMem": 128 << 30,
        },
        memGetInfo=lambda: (FREE_BYTES, 2 * FREE_BYTES),
        memsetAsync=_set,
        memcpyAsync=_copy,
        memcpyHostToDevice=HOST_TO_DEVICE,
        memcpyDeviceToHost=DEVICE_TO_HOST,
    )
    vars(cuda).update(
        runtime=runtime,
        Device=Device,
        Stream=Stream,
        Event=Event,
        get_elapsed_time=lambda begin, end: (end.at - begin.at) * 1e3,
        alloc_pinned_memory=lambda size: SimpleNamespace(ptr=ctypes.addressof(room := _room(size)), keep=room),
    )
    loaded: set[str] = set()
    plain = {name: getattr(numpy, name) for name in ("uint32", "uint64", "int64", "float32")}
    arrays = {name: _made(getattr(numpy, name)) for name in ("empty", "empty_like", "zeros", "asarray")}
    vars(cupy).update(
        **plain,
        **arrays,
        cuda=cuda,
        RawModule=lambda code, options, enable_cooperative_groups=False: _module(
            library_, loaded, code, enable_cooperative_groups
        ),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        is_available=lambda: True,
    )
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime}


def _room(size: int) -> Any:
    return (ctypes.c_char * size)()
