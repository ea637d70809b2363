"""Between two calls, one operand changes in part: its ends, prefixes and sums stay, and the result does not."""

from __future__ import annotations

import pytest
import torch

from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.ops.stored import leaves
from autosel.parity.battery import partly_changed
from autosel.parity.check import ORDINARY_BYTES, ordinary
from autosel.testing.mutants.trial import plain_workload

by_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


@by_op
def test_calls_are_repeated_on_inputs_of_a_middling_size(op: Op) -> None:
    case = ordinary(op.cases(plain_workload(op, "bf16", 1)))
    assert ORDINARY_BYTES / 4 < op.bytes_moved(case.workload) < 4 * ORDINARY_BYTES
    assert case.name.startswith("random ")


@by_op
def test_each_float_operand_changes_by_two_elements_that_decide_the_result(op: Op) -> None:
    inputs = ordinary(op.cases(plain_workload(op, "bf16", 1))).make(5)
    before, changed = op.reference(inputs), []
    for name, value in leaves(inputs).items():
        part = partly_changed(op, inputs, name)
        if part is None:
            continue
        changed.append(name)
        now = part[name]
        apart = (value != now).flatten().nonzero().flatten().tolist()
        assert len(apart) == 2 and apart[1] == apart[0] + 1
        assert torch.equal(value.flatten().sort().values, now.flatten().sort().values)
        assert any(not torch.equal(a, b) for a, b in zip(before, op.reference(part), strict=True))
    wanted = {n for n, v in leaves(inputs).items() if v.is_floating_point() and v.numel() >= 16}
    assert set(changed) == wanted
