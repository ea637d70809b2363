"""Replace CUDA's streams, events and graphs: enqueued work is done when a caller waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

TICK_MS = 0.5  # duration of a call, by the stand-in's clock


class Cuda:
    """A simulated device: time is the number of calls outside captures; a graph is the list of calls in a capture."""

    def __init__(self) -> None:
        self.made: list[int] = []  # copies, in the order their calls ran
        self.captured: list[int] | None = None
        self.refuses = False
        self.captured_on: list[object] = []  # devices of the streams that captures were made on
        self.on: Any = None  # the current stream
        self.pools: list[object] = []  # for which the allocator still assumes a capture
        self.enqueued: list[Callable[[], None]] = []  # work that the device does when a caller waits

    def settle(self, device: object = None) -> None:
        while self.enqueued:
            self.enqueued.pop(0)()

    def call(self, copy: int) -> str:
        if self.captured is not None:
            if self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.captured.append(copy)
        else:
            self.made.append(copy)
        return f"result of {copy}"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0

            def record(self, stream: object = None) -> None:
                self.at = len(cuda.made)

            def synchronize(self) -> None:
                cuda.settle()

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * TICK_MS

        class Graph:
            calls: list[int]

            def replay(self) -> None:
                cuda.made += self.calls

        class Stream:
            def __init__(self, device: object = None) -> None:
                self.device = device

            def wait_stream(self, other: Stream) -> None: ...

            def synchronize(self) -> None:
                cuda.settle()

        @contextmanager
        def graph(into: Graph, pool: object, stream: Stream) -> Iterator[None]:
            """Act like PyTorch's graph: if a call breaks the capture, stream and allocator stay changed."""
            if cuda.pools:
                raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
            cuda.captured_on.append(stream.device)
            cuda.captured = into.calls = []
            before, cuda.on = cuda.on, stream
            cuda.pools.append(pool)
            try:
                yield
            except RuntimeError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            finally:
                cuda.captured = None
            cuda.pools.remove(pool)
            cuda.on = before

        def set_stream(stream: object) -> None:
            cuda.on = stream

        @contextmanager
        def entered(_: object) -> Iterator[None]:
            yield

        def end(device: int, pool: object) -> None:
            if pool not in cuda.pools:
                raise RuntimeError("not currently recording to this pool")
            cuda.pools.remove(pool)

        def set_device(device: torch.device) -> None:
            if device.index is None:  # as PyTorch's own
                raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")

        self.on = Stream()
        stand_ins: dict[str, Any] = {
            "Event": Event, "CUDAGraph": Graph, "Stream": Stream, "graph": graph, "stream": entered, "device": entered,
            "current_stream": lambda device=None: cuda.on, "current_device": lambda: 0, "set_stream": set_stream,
            "graph_pool_handle": object, "synchronize": self.settle, "_sleep": lambda cycles: None,
            "is_available": lambda: True, "set_device": set_device,
        }  # fmt: skip
        for name, value in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)


class OnGpu(torch.Tensor):
    """A tensor of this CPU that claims to be on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @staticmethod
    def of(value: torch.Tensor) -> torch.Tensor:
        return value.as_subclass(OnGpu)
