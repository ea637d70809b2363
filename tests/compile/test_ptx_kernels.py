"""Run the PTX of the CUDA kernels, as compiled by nvcc, on this CPU, with the hostile cases of test_emulated_*.

One kernel per day runs in one dtype, for one compute capability and a share of the cases; --every-target runs all.
`pytest --ptx 9.0 tests/compile/test_emulated_*.py` runs all tests of those files on PTX.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from autosel.ops.contract import Case, Mismatch
from autosel.values import DTypeName
from tests.compile import emulate
from tests.compile import test_emulated_attention as attention
from tests.compile import test_emulated_linear as linear
from tests.compile import test_emulated_rows as rows
from tests.compile.cuda_kernels import Battery, Knobs, faults

CAPABILITIES = ((9, 0), (8, 0), (8, 9), (12, 0))  # the compiled code differs between them
SHARES = {"rows": 2, "products": 4, "attention": 8}

Kernel = tuple[str, DTypeName]
Choice = tuple[str, Kernel, tuple[int, int], int]
KERNELS: dict[str, list[Kernel]] = {
    "rows": list(itertools.product(rows.SHAPES, rows.DTYPES)),
    "products": list(itertools.product(linear.WORKLOADS, linear.DTYPES)),
    "attention": [one for each in attention.EACH.values() for one in each()],
}


def battery_of(family: str, name: str, dtype: DTypeName) -> tuple[Battery, Callable[[Case, Knobs], Mismatch | None]]:
    """Return a kernel's cases, and the function that runs one and returns its fault."""
    if family == "rows":
        return rows.battery(name, dtype), rows.failure
    if family == "products":
        return linear.battery(name, dtype), partial(linear.failure, name, linear.BUILDS[0])
    shapes = range(len(attention.SHAPES[attention.KERNELS[name].op]))
    each = (attention.battery(name, dtype, shape) for shape in shapes)
    return itertools.chain.from_iterable(each), partial(attention.failure, name)


def choices() -> list[Choice]:
    each = (itertools.product([f], KERNELS[f], CAPABILITIES, range(SHARES[f])) for f in KERNELS)
    return list(itertools.chain.from_iterable(each))


def label(choice: Choice) -> str:
    _, (name, dtype), (major, minor), part = choice
    return f"{name} {dtype} {major}.{minor} {part}"


@pytest.mark.in_turns(choices, label=label)
def test_the_ptx_of_a_kernel_meets_its_contract(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    family, (name, dtype), capability, part = choice
    monkeypatch.setattr(emulate, "as_ptx", capability)
    battery, failure = battery_of(family, name, dtype)
    assert faults(itertools.islice(battery, part, None, SHARES[family]), failure) == []
