"""Test the workspace that a Triton kernel keeps between calls: one per stream and one per capture."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

import torch

from autosel.triton_kernels import common
from autosel.triton_kernels.attn_decode import attn_decode
from tests.compile.aot import captured

LIKE = torch.empty(1)


class Place:
    """Replace the driver's answer about the stream of a call, which needs a GPU."""

    def __init__(self) -> None:
        self.stream, self.capture = 1, 0

    def __call__(self, device: torch.device) -> tuple[int, int]:
        return self.stream, self.capture


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    at = Place()
    monkeypatch.setattr(common, "_place", at)
    monkeypatch.setattr(common, "_KEPT", {})
    monkeypatch.setattr(common, "_CAPTURED", {})
    return at


def counters(count: int = 10) -> torch.Tensor:
    return common.counters(LIKE, count)


def test_calls_of_a_stream_share_a_room_and_streams_do_not(place: Place) -> None:
    first = counters()
    assert counters() is first
    assert not first.any() and first.dtype == torch.int32
    place.stream = 2
    assert counters() is not first


def test_a_room_that_has_been_outgrown_is_kept_for_graphs_that_point_at_it(place: Place) -> None:
    small = counters()
    large = counters(small.numel() + 1)
    assert large.numel() > small.numel()
    assert counters() is large
    assert common._KEPT[LIKE.device, 1, torch.int32] == [small, large]


def test_graphs_captured_on_one_stream_share_no_counters_with_each_other_or_with_it(place: Place) -> None:
    eager, place.capture = counters(), 7
    one = counters()
    assert counters() is one
    place.capture = 8
    two = counters()
    place.capture = 0
    assert counters() is eager
    assert len({t.data_ptr() for t in (eager, one, two)}) == 3


def test_zeros_made_only_by_a_graph_are_not_used_outside_it(place: Place) -> None:
    place.capture = 7
    captured = counters()
    place.capture = 0
    assert counters() is not captured


def test_partial_sums_of_a_capture_are_the_graphs_own(place: Place) -> None:
    kept, place.capture = common.partials(LIKE, 10), 7
    captured = common.partials(LIKE, 10)
    assert captured is not kept and captured.numel() == 10
    assert captured.dtype == kept.dtype == torch.float32


def test_many_query_rows_are_split_only_as_needed_to_fill_the_chip() -> None:
    """Split less for a chunk of a prompt: its rows fill the chip, and each split keeps an fp32 output of each row."""
    q, cache = torch.empty(1, 8, 512, 64, dtype=torch.bfloat16), torch.empty(1, 2, 8192, 64, dtype=torch.bfloat16)
    with captured((9, 0)) as launches:
        attn_decode(q, cache, cache, None, 8192, 0.0, 0, 0.0, chunk=512)
    assert launches[0].grid == (1, 4 * 512 // 64, 2)
