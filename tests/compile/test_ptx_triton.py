"""Run the PTX of Triton's kernels, compiled for Hopper, on this CPU: hostile cases of every plan (triton_kernels.py).

A quarter of the cases of two plans run per day, each in one dtype; --every-target runs all, in all dtypes.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

from autosel.values import DTypeName
from tests.compile.ptx_triton import failures
from tests.compile.triton_kernels import DTYPES, PLANS, Plan

PARTS = 4
GROUPS = 2

Choice = tuple[Plan, DTypeName, int]


def choices(group: int) -> list[Choice]:
    return list(itertools.product(PLANS[group::GROUPS], DTYPES, range(PARTS)))


def label(choice: Choice) -> str:
    plan, dtype, part = choice
    return f"{plan.label} {dtype} {part}"


@pytest.mark.in_turns({f"group {g}": partial(choices, g) for g in range(GROUPS)}, label=label, days=2)
def test_a_compiled_triton_kernel_meets_its_contract(choice: Choice) -> None:
    plan, dtype, part = choice
    assert list(failures(plan, dtype, PARTS, part)) == []
