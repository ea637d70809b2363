"""Check that differences between serving steps do not compile a Triton kernel again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

import torch

from autosel.triton_kernels.attn_decode import attn_decode
from autosel.triton_kernels.kv_append import kv_append
from autosel.triton_kernels.lm_head import lm_head
from autosel.triton_kernels.paged_attn_decode import paged_attn_decode
from autosel.triton_kernels.rope import rope
from autosel.triton_kernels.sample import sample
from tests.compile.aot import captured


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def slice_of(count: int, dtype: torch.dtype, first: int) -> torch.Tensor:
    """Return `count` values of a tensor from the `first` on, aligned to 16 bytes only for 0."""
    return torch.zeros(count + first, dtype=dtype)[first:]


def sampled(step: int) -> None:
    """Sample with a history that grows by a token per step, and a row of all draws per step."""
    settings = [
        slice_of(2, dtype, step)
        for dtype in (torch.float32, torch.int32, torch.float32, torch.float32, torch.float32, torch.int64)
    ]
    sample(bf16(2, 512), torch.zeros((2, 15 + step), dtype=torch.int64), *settings)


def attended(step: int) -> None:
    q, cache = bf16(2, 4, 1, 64), bf16(2, 2, 640, 64)
    attn_decode(q, cache, cache, slice_of(2, torch.int32, step), 559 + step, 0.0, 0, 0.0)


def attended_pages(step: int) -> None:
    q, cache, table = bf16(2, 4, 1, 64), bf16(80, 16, 2, 64), torch.zeros((2, 40), dtype=torch.int32)
    paged_attn_decode(q, cache, cache, table, slice_of(2, torch.int32, step), 559 + step, 0.0, 0, 0.0)


def appended(step: int) -> None:
    new, cache = bf16(2, 2, 1, 64), bf16(2, 2, 640, 64)
    kv_append(new, new, slice_of(2, torch.int32, step), None, cache, cache)


def turned(step: int) -> None:
    rope(bf16(2, 4, 64), bf16(2, 2, 64), slice_of(2, torch.int64, step), torch.ones(32), 0)


def named(step: int) -> None:
    """Write tokens at the end of the growing answer."""
    lm_head(bf16(2, 512), bf16(300, 512), True, slice_of(2, torch.int64, step))


def named_many(step: int) -> None:
    lm_head(bf16(9 + step, 512), bf16(300, 512), True, slice_of(9 + step, torch.int64, step))


CALLS = (sampled, attended, attended_pages, appended, turned, named, named_many)


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_the_next_step_needs_no_other_kernel(call: Callable[[int], None]) -> None:
    with captured((9, 0)) as launches:
        for step in (0, 1, 2):
            call(step)
    assert len(launches) == 3
    assert len({launch.ttir for launch in launches}) == 1
