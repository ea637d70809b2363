"""Run the PTX of the CUDA kernels, as compiled by nvcc, on this CPU, with the hostile cases of test_emulated_*.

One kernel per day runs in one dtype, for one compute capability and a share of the cases; --every-target runs all.
`pytest --ptx 9.0 tests/compile/test_emulated_*.py` runs all tests of those files on PTX.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from autosel.ops import OPS
from autosel.ops.contract import Case, Mismatch
from autosel.values import DTypeName
from tests.compile import emulate
from tests.compile import test_emulated_attention as attention
from tests.compile import test_emulated_linear as linear
from tests.compile import test_emulated_rows as rows

CAPABILITIES = ((9, 0), (8, 0), (8, 9), (12, 0))  # the compiled code differs between them
SHARES = {"rows": 2, "products": 4, "attention": 8}

Kernel = tuple[str, DTypeName]
Choice = tuple[str, Kernel, tuple[int, int], int]
Battery = Iterator[tuple[Case, Callable[[], Mismatch | None]]]
KERNELS: dict[str, list[Kernel]] = {
    "rows": list(itertools.product(rows.SHAPES, rows.DTYPES)),
    "products": list(itertools.product(linear.WORKLOADS, linear.DTYPES)),
    "attention": [one for each in attention.EACH.values() for one in each()],
}


def of_rows(name: str, dtype: DTypeName) -> Battery:
    dims, traits, plans = rows.SHAPES[name]
    knobs = itertools.cycle(plans)
    for values in itertools.product(*traits.values()):
        for made in OPS[name].cases(OPS[name].workload(dtype, dims, **dict(zip(traits, values, strict=True)))):
            yield made, partial(rows.failure, OPS[name], made, next(knobs))


def of_products(name: str, dtype: DTypeName) -> Battery:
    plans = itertools.cycle(linear.PLANS)
    op, formats = linear.contract(name)
    for dims, traits in linear.WORKLOADS[name]:
        for made in op.cases(op.workload(dtype, dims, **traits, **formats)):
            yield made, partial(linear.failure, op, made, linear.BUILDS[0], next(plans))


def of_attention(name: str, dtype: DTypeName) -> Battery:
    op, cuts = attention.KERNELS[name], itertools.cycle(attention.CUTS)
    for dims, traits in attention.SHAPES[op]:
        for made in OPS[op].cases(attention.workload(name, dtype, dims, **traits)):
            yield made, partial(attention.failure, name, made, next(cuts))


BATTERIES = {"rows": of_rows, "products": of_products, "attention": of_attention}


def choices() -> list[Choice]:
    each = (itertools.product([f], KERNELS[f], CAPABILITIES, range(SHARES[f])) for f in BATTERIES)
    return list(itertools.chain.from_iterable(each))


def label(choice: Choice) -> str:
    _, (name, dtype), (major, minor), part = choice
    return f"{name} {dtype} {major}.{minor} {part}"


@pytest.mark.in_turns(choices, label=label)
def test_the_ptx_of_a_kernel_meets_its_contract(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    family, (name, dtype), capability, part = choice
    monkeypatch.setattr(emulate, "as_ptx", capability)
    wrong = []
    for made, failure in itertools.islice(BATTERIES[family](name, dtype), part, None, SHARES[family]):
        found = failure()
        if found is not None:
            wrong.append(f"{made.workload.key} {made.name}: {found.check}: {found.reason}")
    assert not wrong, "\n".join(wrong)
