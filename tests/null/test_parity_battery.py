"""Test the size of the cases on which many calls are made."""

from __future__ import annotations

import pytest

from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.parity.check import CHEAP_BYTES, ORDINARY_BYTES, cheap_case, ordinary
from autosel.testing.mutants.trial import plain_workload

by_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


@by_op
def test_calls_are_repeated_on_inputs_of_a_medium_size(op: Op) -> None:
    case = ordinary(op.cases(plain_workload(op, "bf16", 1)))
    assert ORDINARY_BYTES / 4 < op.bytes_moved(case.workload) < 4 * ORDINARY_BYTES
    assert case.name.startswith("random ")


@by_op
def test_slow_ops_make_their_thousands_of_calls_on_fewer_elements(op: Op) -> None:
    case = cheap_case(op.cases(plain_workload(op, "bf16", 1)))
    assert CHEAP_BYTES <= op.bytes_moved(case.workload) < 4 * CHEAP_BYTES
    assert case.name.startswith("random ")
