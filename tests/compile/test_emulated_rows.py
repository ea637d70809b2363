"""Test the CUDA row kernels on emulated threads: every hostile case of their op, every dtype, every CTA width."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosel.ops import OPS
from autosel.ops.contract import Case, Mismatch
from autosel.values import DTypeName
from tests import drawn
from tests.compile import cuda_kernels
from tests.compile.cuda_kernels import DTYPES, Battery, Knobs, faults, results_of
from tests.compile.emulate import emulated
from tests.cpu.row_claims import (
    SAMPLING,
    judged,
    keep_far_angle,
    rotate_slices_in_place,
    sample_equal_logits,
    sample_without_distribution,
    update_residual_in_place,
)

ROWS = ((512, 4, 0), (32, 1, 1), (96, 3, 0), (1024, 2, 0))  # threads, grid, pdl
# op -> its shape, traits in all combinations, alternating knobs
SHAPES: dict[str, tuple[dict[str, int], dict[str, tuple[Any, ...]], tuple[tuple[int, ...], ...]]] = {
    "rmsnorm": ({"M": 4, "d": 4096}, {"offset": (0.0, 1.0)}, ROWS),
    "add_rmsnorm": ({"M": 4, "d": 4096}, {"offset": (0.0, 1.0), "sandwich": (0, 1, 2)}, ROWS),
    # threads, grid, pdl; then grid, pdl
    "rope": ({"M": 4, "Hq": 32, "Hkv": 8, "D": 128, "R": 128}, {"style": (0, 1)}, ((256, 20, 0), (32, 3, 1))),
    "swiglu": ({"M": 3, "I": 14336}, {}, ((21, 0), (1, 1))),
    "geglu": ({"M": 3, "I": 6912}, {"tanh": (0, 1)}, ((21, 0), (1, 1))),
    "sample": ({"B": 2, "V": 128_256, "L": 64}, {}, ((12, 0), (1, 1), (3, 0))),  # ctas_per_row, pdl
    "kv_append": ({"B": 2, "Hkv": 2, "S": 3, "D": 128}, {"page": (0, 16)}, ((2, 0), (1, 1))),
}


def battery(name: str, dtype: DTypeName) -> Battery:
    op, (dims, traits, knobs) = OPS[name], SHAPES[name]
    turns = itertools.cycle(knobs)
    for values in itertools.product(*traits.values()):
        for made in op.cases(op.workload(dtype, dims, **dict(zip(traits, values, strict=True)))):
            yield made, next(turns)


def failure(made: Case, knobs: Knobs) -> Mismatch | None:
    name = made.workload.op
    return cuda_kernels.failure(emulated(name, name), made, knobs)


@pytest.mark.parametrize(("name", "dtype"), drawn.share(list(itertools.product(SHAPES, DTYPES)), days=8))
def test_a_row_kernel_meets_its_contract_in_every_case(name: str, dtype: DTypeName) -> None:
    assert faults(battery(name, dtype), failure) == []


@pytest.mark.parametrize(("what", "settings"), SAMPLING, ids=[s[0] for s in SAMPLING])
def test_a_real_vocabulary_is_sampled_as_defined(what: str, settings: dict[str, float]) -> None:
    found = judged(settings, emulated("sample", "sample"), 12, 0)
    assert not isinstance(found, Mismatch), found


def test_equal_logits_are_kept_from_the_lowest_index_up() -> None:
    sample_equal_logits(emulated("sample", "sample"), 5, 0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_logits_without_a_distribution_still_give_a_token_in_range(poison: float) -> None:
    sample_without_distribution(emulated("sample", "sample"), poison, 4, 0)


# --- what the op's battery does not reach ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8192, 16_384, 33_000, 40_000, 70_001])
def test_a_long_row_is_normalised_whether_registers_hold_it_or_not(width: int) -> None:
    for name in ("rmsnorm", "add_rmsnorm"):
        op = OPS[name]
        w = op.workload("bf16", {"M": 2, "d": width})
        inputs = op.inputs(w, 5)
        found = op.verify(inputs, results_of(emulated(name, name), w, inputs, (1024, 2, 0)))
        assert not isinstance(found, Mismatch), found


@pytest.mark.parametrize("sandwich", [0, 1])
def test_the_residual_stream_may_be_updated_in_place(sandwich: int) -> None:
    update_residual_in_place(emulated("add_rmsnorm", "add_rmsnorm"), sandwich, 128, 3, 0)


@pytest.mark.parametrize("style", [0, 1])
def test_rope_may_rotate_slices_of_one_projection_in_place(style: int) -> None:
    rotate_slices_in_place(emulated("rope", "rope"), style, 64, 7, 0)


@pytest.mark.parametrize("position", [1 << 17, (1 << 20) + 7, (1 << 31) - 1])
def test_rope_keeps_the_angle_of_a_far_position(position: int) -> None:
    keep_far_angle(emulated("rope", "rope"), position, 32, 1, 0)


@pytest.mark.parametrize("page", [0, 16])
def test_an_append_outside_the_cache_is_not_written(page: int) -> None:
    """Skip only this token: positions are on the device, and reading them on the host would stall the stream."""
    op = OPS["kv_append"]
    w = op.workload("bf16", {"B": 2, "Hkv": 2, "S": 3, "D": 64}, page=page)
    inputs = op.inputs(w, 3)
    slots = inputs["k_cache"].shape[2] if not page else inputs["block_table"].shape[1] * page
    for bad in (-1, slots, 2**31 - 1):
        inputs["positions"][:] = torch.tensor([5, bad])
        before = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        emulated("kv_append", "kv_append")(*op.arguments(inputs), 4, 0)
        inside = {n: before[n][:1] for n in ("k", "v", "positions")}
        if page:
            want = op.reference(before | inside | {"block_table": before["block_table"][:1]})
            assert torch.equal(inputs["k_cache"].double(), want[0]) or bad == -1
        else:
            want = op.reference(before | inside | {n: before[n][:1] for n in ("k_cache", "v_cache")})
            assert torch.equal(inputs["k_cache"][:1].double(), want[0])
            if bad > 0:
                assert torch.equal(inputs["k_cache"][1], before["k_cache"][1])
        inputs |= {n: before[n] for n in ("k_cache", "v_cache")}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rmsnorm", lambda t: (t(2, 8), t(9), 1e-6, 0.0, t(2, 8), 32, 1, 0)),
        ("rmsnorm", lambda t: (t(8, 2).T, t(8), 1e-6, 0.0, t(2, 8), 32, 1, 0)),
        ("rmsnorm", lambda t: (t(2, 8), t(8), 1e-6, 0.0, t(2, 8), 33, 1, 0)),
        ("add_rmsnorm", lambda t: (t(2, 8), t(2, 7), t(8), 1e-6, 0.0, 0, t(2, 8), t(2, 8), 32, 1, 0)),
        ("swiglu", lambda t: (t(2, 8), t(2, 8), t(3, 8), 1, 0)),
        ("geglu", lambda t: (t(2, 8), t(2, 8).half(), 0, t(2, 8), 1, 0)),
        ("rope", lambda t: (t(1, 1, 8), t(1, 1, 8), torch.zeros(1).int(), t(4), 0, t(1, 1, 8), t(1, 1, 8), 32, 1, 0)),
        ("rope", lambda t: (t(1, 1, 8), t(1, 1, 8), torch.zeros(1).long(), t(5), 0, t(1, 1, 8), t(1, 1, 8), 32, 1, 0)),
        ("sample", lambda t: (t(1, 8), torch.zeros(1, 1), *[t(1)] * 5, torch.zeros(1).long(), 1, 0)),
    ],
)
def test_arguments_of_another_shape_or_dtype_are_refused(
    name: str, arguments: Callable[[Any], tuple[Any, ...]]
) -> None:
    with pytest.raises((ValueError, TypeError)):
        emulated(name, name)(*arguments(torch.zeros))
