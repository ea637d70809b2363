"""What the guard asks is the same wherever the operands are, and wherever the process makes its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosel import ops
from autosel.candidates import registry
from autosel.candidates.load import load
from autosel.dispatch.board import this_device
from autosel.guard import rate
from autosel.values import Knobs
from tests.null import test_guard as guards

# --- a process whose tensors are made elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.OPS.values(), ids=lambda op: op.name)
def test_a_process_that_makes_its_tensors_on_another_device_is_checked_as_any_other(
    op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.set_default_device` is the user's, and Inductor sets it while it warms up."""
    w = op.cases(guards.small(op))[0].workload
    inputs = op.inputs(w, 1)
    kernel = load(op, registry.baseline(op.name).recipe(w, this_device(), Knobs()), "", {})
    monkeypatch.setattr("autosel.guard.judge.FEW_ULPS", -1.0)  # everything looks wrong: every check is made
    watch, told = guards.watched(kernel, op=op, w=w)
    with torch.device("meta"):
        for _ in range(4):
            watch(op.arguments(inputs), (None,) * len(op.outputs(w)) if op.written(w, inputs) is None else ())
    assert not told and watch.troubles == watch.unjudged == 0
    assert watch.rate.checks == 4


def test_a_wrong_kernel_is_found_there_too_and_by_whom() -> None:
    watch, told = guards.watched(guards.scaled)
    with torch.device("meta"):
        given = guards.call(watch)
    assert torch.equal(given, guards.right(guards.X))
    assert [fault.cause for fault in told] == ["kernel"]
    assert rate.is_deep(0), "or the rows in float64 were never asked"
