"""Test that a kernel which changes any global state of the process is refused, and that reading the state does not
change it."""

from __future__ import annotations

import pytest

from autosel.ops import OPS
from autosel.parity.battery import STATE
from autosel.parity.check import Prover, Terms
from autosel.parity.state import State
from autosel.values import Failed
from tests.cpu.planted_state import CHANGES
from tests.cpu.planting import proof

pytestmark = pytest.mark.usefixtures("preforked")


def found(name: str) -> Failed:
    """Return the results of the checks of one case and of the global state."""
    planted = proof(f"kernel_{name}", module="planted_state")
    with Prover(None, Terms(), threads=1) as prover:
        steps = prover.steps(planted)
        verdict = prover.take(planted, [steps[0], next(s for s in steps if s.name == STATE)])
    assert isinstance(verdict, Failed), verdict
    return verdict


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_process_is_refused_by_its_name(name: str) -> None:
    verdict = found(name)
    assert verdict.check == "global_state", verdict
    assert any(changed.startswith(CHANGES[name][1]) for changed in verdict.evidence), verdict.evidence


def test_what_was_replaced_is_named() -> None:
    assert found("wraps_rms_norm").evidence == {"functions": ["", "torch.nn.functional.rms_norm"]}


def test_reading_the_state_does_not_change_it() -> None:
    state = State()
    assert state.now() == state.now()


def test_a_baseline_does_not_change_the_process() -> None:
    from autosel.ops import eager

    state, before = State(), State().now()
    for op in (OPS["rmsnorm"], OPS["linear"]):
        case = op.cases(op.workload("bf16", dict.fromkeys(op.dim_names, 8)))[0]
        getattr(eager, op.name)(*op.arguments(case.make(1)))
    assert state.now() == before
