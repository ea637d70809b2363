"""Test that the greedy choice without PyTorch's threads equals torch.argmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosel.decode.sample import BITS, largest

FLOATS = st.sampled_from(
    [-math.inf, -1e30, -2.5, -1.0, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 0.5, 1.0, 1.0078125, 2.5, 3e4, math.inf]
)


def chosen(logits: torch.Tensor) -> list[int]:
    found: list[int] = largest(logits, torch.empty(len(logits), dtype=torch.int64)).tolist()
    return found


@pytest.mark.parametrize("dtype", BITS)
@given(rows=st.integers(1, 7).flatmap(lambda n: st.lists(st.lists(FLOATS, min_size=n, max_size=n), min_size=1)))
def test_the_greedy_choice_is_the_first_of_the_largest_logits(dtype: torch.dtype, rows: list[list[float]]) -> None:
    logits = torch.tensor(rows).to(dtype)
    assert chosen(logits) == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", BITS)
def test_a_row_of_nan_gets_the_token_of_torch(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, math.nan, 2.0], [-1.0, -2.0, math.nan], [3.0, 4.0, 1.0]]).to(dtype)
    assert chosen(logits) == logits.argmax(-1).tolist()


def test_rows_that_are_a_part_of_a_larger_tensor_are_read_in_place() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert chosen(logits[:, 5:30]) == logits[:, 5:30].argmax(-1).tolist()
