"""Test memory on large pages that one workload's copies leave to the next one's."""

from __future__ import annotations

import pytest
import torch

from autosel.workers import pages
from autosel.workers.pages import LARGE_PAGE_BYTES, Reused


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32)


@pytest.mark.parametrize("count", [3, 1 << 20, (1 << 20) + 5])
def test_copies_are_equal_apart_and_on_large_pages(count: int) -> None:
    reused = Reused()
    copies = [reused.clone(numbers(count, first)) for first in range(4)]
    for first, copy in enumerate(copies):
        assert torch.equal(copy, numbers(count, first)) and copy.is_contiguous()
        assert copy.nbytes < LARGE_PAGE_BYTES or copy.data_ptr() % LARGE_PAGE_BYTES == 0
    assert len({copy.untyped_storage()._cdata for copy in copies}) == 4, "a storage names one weight"


def test_the_next_copies_lie_where_the_last_ones_did() -> None:
    reused = Reused()
    places = [reused.clone(numbers(1 << 20)).data_ptr() for _ in range(3)]  # each is freed, not its place
    reused.restart()
    assert reused.clone(numbers(1 << 19)).data_ptr() == places[0]


def test_a_copy_that_is_still_in_use_is_left_alone() -> None:
    reused = Reused()
    kept = reused.clone(numbers(1 << 20))[5:]
    reused.restart()
    other = reused.clone(numbers(1 << 20, 7))
    assert torch.equal(kept, numbers(1 << 20)[5:]) and torch.equal(other, numbers(1 << 20, 7))


def test_memory_in_several_parts_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CHUNK_BYTES", 2 * LARGE_PAGE_BYTES)
    reused, value = Reused(), numbers(1 << 20)
    for _ in range(3):
        copies = [reused.clone(value) for _ in range(5)]
        parts = len(reused.chunks)
        assert all(torch.equal(copy, value) for copy in copies)
        del copies
        reused.restart()
    assert parts == 1
    assert sum(size for _, _, size in reused.chunks) <= 6 * value.nbytes
