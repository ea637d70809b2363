"""Run the long form of tests/compile/test_triton.py: every known device, every shape, every dtype."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

from autosel.values import DTypeName, Passed
from tests.compile.aot import problems
from tests.compile.triton_kernels import DEVICES, DTYPES, KERNELS, PLANS, SHAPES, Plan


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_triton_kernel_compiles_for_every_known_device(name: str, device: str) -> None:
    kernel = KERNELS[name]
    assert problems(kernel, device, SHAPES[kernel.op], DTYPES, spills=True) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS, ids=[plan.label for plan in PLANS])
def test_a_triton_kernel_is_proven_in_the_interpreter_in_every_dtype(plan: Plan, dtype: DTypeName) -> None:
    found = plan.prove(dtype)
    assert isinstance(found, Passed), found
