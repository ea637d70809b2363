"""The CUDA kernels as nvcc compiles them for Hopper, their PTX run on this CPU: the hostile cases of test_emulated_*.

A kernel of rows, a product and an attention a day, each in one dtype; --every-target takes all.
`pytest --ptx tests/compile/test_emulated_*.py` runs everything else of those files so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from autosel.values import DTypeName
from tests.compile import emulate
from tests.compile import test_emulated_attention as attention
from tests.compile import test_emulated_linear as linear
from tests.compile import test_emulated_rows as rows

Choice = tuple[str, DTypeName]


def of_rows() -> list[Choice]:
    return list(itertools.product(rows.SHAPES, rows.DTYPES))


def of_products() -> list[Choice]:
    return list(itertools.product(linear.WORKLOADS, linear.DTYPES))


def of_attention() -> list[Choice]:
    return [one for each in attention.EACH.values() for one in each()]


BATTERIES: tuple[tuple[Callable[[], list[Choice]], Callable[[Choice], None]], ...] = (
    (of_rows, lambda c: rows.test_a_row_kernel_meets_its_contract_in_every_case(*c)),
    (of_products, lambda c: linear.test_a_projection_meets_its_contract_in_every_case(*c, linear.BUILDS[0])),
    (of_attention, attention.test_attention_meets_its_contract_in_every_case),
)


@pytest.mark.in_turns({choices.__name__: choices for choices, _ in BATTERIES}, label="-".join)
def test_the_ptx_of_a_kernel_meets_its_contract_in_every_case(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "as_ptx", True)
    battery = next(run for choices, run in BATTERIES if choice in choices())
    battery(choice)
