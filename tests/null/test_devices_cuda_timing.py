"""Test samples on a GPU, on a stand-in for CUDA's streams, events and graphs: the calls, and the division of times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autosel.devices.cpu.device import Cpu
from autosel.devices.cuda import timing
from autosel.devices.cuda.timing import Replayed, same_layout
from tests.null.cuda_stand_in import TICK_MS, Cuda

GPU = torch.device("cuda", 0)


def replayed(cuda: Cuda, copies: int) -> Replayed:
    return Replayed(cuda.call, [(i,) for i in range(copies)], GPU)


def test_a_graph_takes_every_copy_equally_often(cuda: Cuda) -> None:
    """Use every copy, because unused copies would leave room in the cache for the others."""
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


def test_the_result_is_that_of_the_graph_replayed_last(cuda: Cuda) -> None:
    """Return this result, because each graph writes to separate memory, and others have older results."""
    timed, found = Replayed(lambda copy: object(), [(0,)], GPU), []
    for calls in (1, 3, 1, 3):
        timed.sample(calls)
        found.append(timed.result)
    assert found[0] is found[2]
    assert found[1] is found[3]
    assert found[0] is not found[1]


def test_an_arm_that_cannot_be_captured_is_timed_as_a_queue(cuda: Cuda) -> None:
    cuda.refuses = True
    timed = replayed(cuda, 4)
    assert timed.sample(20) == TICK_MS * 1e6
    assert timed.graphs == {20: None}
    assert timed.result == "result of 3"


def test_an_arm_that_cannot_be_captured_does_not_spoil_other_captures(cuda: Cuda) -> None:
    """Restore PyTorch's stream and allocator, which otherwise stay in the capture and refuse all later ones."""
    cuda.refuses, before = True, cuda.on
    replayed(cuda, 4).sample(4)
    assert cuda.on is before
    cuda.refuses = False
    timed = replayed(cuda, 4)
    timed.sample(4)
    assert timed.graphs[4] is not None


def test_a_failing_arm_is_not_mistaken_for_one_that_cannot_be_captured(cuda: Cuda) -> None:
    def broken(copy: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        Replayed(broken, [(0,)], GPU).sample(1)


def test_lines_pinned_in_the_l2_are_released_before_each_sample(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    driver = SimpleNamespace(
        cuCtxResetPersistingL2Cache=lambda: told.append("reset"),
        cuCtxSetLimit=lambda limit, value: told.append((limit, value.value)),
    )
    monkeypatch.setattr(timing, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append("held"))
    timed = replayed(cuda, 2)
    for _ in range(2):
        timed.sample(2)
    assert told == ["reset", (6, 0), "held"] * 2


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


def test_no_arm_starts_with_the_copies_that_another_has_just_read() -> None:
    """Run two arms over six copies: each sample continues after the last sample of either arm, so copies are cold."""
    place, made = Cpu(), []
    arms = [place.timed(lambda copy, arm=arm: made.append((arm, copy)), [(i,) for i in range(6)]) for arm in "ab"]
    for arm in (0, 1, 1, 0):
        arms[arm].sample(2)
    assert made == [("a", 0), ("a", 1), ("b", 2), ("b", 3), ("b", 4), ("b", 5), ("a", 0), ("a", 1)]
