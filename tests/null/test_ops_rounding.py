"""Test that the error formulas hold, and that the comparison that uses them fails closed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosel.ops.compare import compare
from autosel.ops.contract import DTYPE, Match, Mismatch
from autosel.ops.rounding import flushable, matmul_error, stored

floats = st.floats(-(2.0**127), 2.0**127, width=32)
dtypes = st.sampled_from(["bf16", "fp16", "fp32"])


@given(floats, dtypes)
def test_storing_a_value_stays_within_the_bound_of_a_store(value: float, dtype: str) -> None:
    y = torch.tensor([value], dtype=torch.float64)
    kept = y.to(DTYPE[dtype]).double()
    if kept.isfinite():
        assert bool((kept - y).abs() <= stored(y, torch.zeros(1), dtype))


@given(st.floats(-1e-37, 1e-37), st.sampled_from(["bf16", "fp32"]))
def test_flushing_a_subnormal_result_is_within_the_bound_of_a_store(value: float, dtype: str) -> None:
    y = torch.tensor([value], dtype=torch.float64)
    if abs(value) < 2.0**-126:
        assert bool(y.abs() <= stored(y, torch.zeros(1), dtype))


@given(st.floats(1e-3, 1e3), dtypes)
def test_the_bound_of_a_store_excludes_three_roundings(value: float, dtype: str) -> None:
    y = torch.tensor([value], dtype=torch.float64)
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[dtype]
    assert bool(stored(y, torch.zeros(1), dtype) < 3 * unit * y)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), dtypes, st.floats(0.0, 4.0))
def test_an_fp32_sum_in_any_order_stays_within_its_bound(seed: int, k: int, dtype: str, tilt: float) -> None:
    """Move the operands off zero by `tilt`, so that sums grow and roundings are largest."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (((torch.randn(1, k, generator=generator)) + tilt).to(DTYPE[dtype]) for _ in range(2))
    terms = (x.float() * w.float())[0]
    exact = (x.double() * w.double()).sum()
    allowed = matmul_error(x, w)[0, 0]
    lanes = torch.nn.functional.pad(terms, (0, -k % 16)).view(-1, 16)
    walked = torch.zeros(16)
    for row in lanes:
        walked = walked + row
    for got in (terms.sum(), terms.flip(0).sum(), walked.sum(), terms[torch.randperm(k, generator=generator)].sum()):
        assert abs(got.double() - exact) <= allowed


@given(st.integers(2, 2000))
def test_a_dropped_term_of_typical_size_is_beyond_the_bound(k: int) -> None:
    ones = torch.ones(1, k, dtype=torch.bfloat16)
    assert matmul_error(ones, ones)[0, 0] < 0.5


def test_only_subnormals_are_flushable() -> None:
    x = torch.tensor([0.0, 1.0, 1e-39, -1e-39, 2.0**-126, math.nan, math.inf], dtype=torch.bfloat16)
    assert flushable(x).tolist() == pytest.approx([0, 0, x[2].item(), x[2].item(), 0, 0, 0])


# --- comparing --------------------------------------------------------------------------------------------------------


def judged(got: list[float], reference: list[float], bound: list[float]) -> Match | Mismatch:
    ref, tol = (torch.tensor(v, dtype=torch.float64) for v in (reference, bound))
    return compare((torch.tensor(got, dtype=torch.float32),), (ref,), (tol,))


def test_one_element_outside_its_bound_refuses_the_result() -> None:
    found = judged([1.0] * 999 + [1.2], [1.0] * 1000, [0.1] * 1000)
    assert isinstance(found, Mismatch) and found.check == "elements" and found.evidence["wrong_elements"] == 1


def test_a_bound_that_is_not_a_number_allows_nothing() -> None:
    assert isinstance(judged([1.5], [1.0], [math.nan]), Mismatch)
    assert isinstance(judged([1.5], [1.0], [0.0]), Mismatch)
    assert isinstance(judged([1.0], [1.0], [0.0]), Match)


@pytest.mark.parametrize(
    ("got", "reference"),
    [(0.0, math.nan), (math.nan, 0.0), (math.inf, math.nan), (math.inf, -math.inf), (1e38, math.inf), (math.inf, 1.0)],
)
def test_nan_and_infinity_must_be_where_the_reference_has_them(got: float, reference: float) -> None:
    found = judged([got], [reference], [math.inf])
    assert isinstance(found, Mismatch) and found.check == "nan_pattern"


def test_a_value_beyond_the_dtype_is_rightly_infinite() -> None:
    assert isinstance(judged([math.inf], [1e39], [1e30]), Match)
