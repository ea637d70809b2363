"""Samples on a GPU, on a stand-in for CUDA's streams, events and graphs: which calls are made, and what is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autosel.race import device
from autosel.race.device import Host, Replayed, same_layout

TICK_MS = 0.5  # what a call takes, by the stand-in's clock


class Cuda:
    """Time is the number of calls made outside a capture; a graph is the list of calls made inside one."""

    def __init__(self) -> None:
        self.made: list[int] = []  # copies, in the order their calls ran
        self.captured: list[int] | None = None
        self.refuses = False

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

            def record(self) -> None:
                self.at = len(cuda.made)

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * TICK_MS

        class Graph:
            calls: list[int]

            def replay(self) -> None:
                cuda.made += self.calls

        class Stream:
            def wait_stream(self, other: Stream) -> None: ...

        @contextmanager
        def graph(into: Graph) -> Iterator[None]:
            cuda.captured = into.calls = []
            try:
                yield
            finally:
                cuda.captured = None

        @contextmanager
        def stream(_: Stream) -> Iterator[None]:
            yield

        stand_ins: dict[str, Any] = {
            "Event": Event, "CUDAGraph": Graph, "Stream": Stream, "graph": graph, "stream": stream,
            "current_stream": Stream, "synchronize": lambda *_: None, "_sleep": lambda cycles: None,
        }  # fmt: skip
        for name, value in stand_ins.items():
            monkeypatch.setattr(device.torch.cuda, name, value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    made.install(monkeypatch)
    return made


def replayed(cuda: Cuda, copies: int) -> Replayed:
    return Replayed(cuda.call, [(i,) for i in range(copies)])


def test_a_sample_is_the_time_of_a_call(cuda: Cuda) -> None:
    assert replayed(cuda, 4).sample(20) == TICK_MS * 1e6


def test_a_graph_takes_every_copy_equally_often(cuda: Cuda) -> None:
    """Else the copies it leaves out make room in the cache for those it takes."""
    timed = replayed(cuda, 8)
    timed.sample(20)
    before = len(cuda.made)
    timed.sample(20)
    assert cuda.made[before:] == list(range(8)) * 3


def test_a_graph_is_captured_once_a_length(cuda: Cuda) -> None:
    timed = replayed(cuda, 4)
    for calls in (20, 20, 18, 1):
        timed.sample(calls)
    assert sorted(timed.graphs) == [4, 20]


def test_what_cannot_be_captured_is_timed_as_a_queue(cuda: Cuda) -> None:
    cuda.refuses = True
    timed = replayed(cuda, 4)
    assert timed.sample(20) == TICK_MS * 1e6
    assert timed.graphs == {20: None}
    assert timed.result == "result of 3"


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_a_copy_keeps_strides_and_alignment(offset: int) -> None:
    base = torch.arange(400, dtype=torch.float32)
    for value in (base[offset:].as_strided((3, 5), (20, 1)), base[offset:].as_strided((3, 5), (0, 1)), base[:0]):
        made = same_layout(value, "cpu")
        assert torch.equal(made, value)
        assert made.stride() == value.stride()
        assert made.data_ptr() != value.data_ptr() or not value.numel()
        if value.numel():
            assert made.data_ptr() % 64 == value.data_ptr() % 64


def test_no_arm_begins_where_another_has_just_been() -> None:
    """Two arms over six copies: each sample goes on where the last of either ended: none finds warm ones."""
    place, made = Host(), []
    arms = [place.timed(lambda copy, arm=arm: made.append((arm, copy)), [(i,) for i in range(6)]) for arm in "ab"]
    for arm in (0, 1, 1, 0):
        arms[arm].sample(2)
    assert made == [("a", 0), ("a", 1), ("b", 2), ("b", 3), ("b", 4), ("b", 5), ("a", 0), ("a", 1)]
