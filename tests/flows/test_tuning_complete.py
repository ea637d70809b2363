"""Test that the daemon runs the remaining rows of a proof's array, with the proof's own inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel.dispatch.board import this_device
from autosel.ledger import Ledger, open_ledger
from autosel.ledger.key import current_mode
from autosel.parity.check import Terms, check_all
from autosel.parity.session import built
from autosel.tuning.complete import complete
from autosel.tuning.prove import FIRST_PAIRS
from autosel.values import Failed, Passed
from tests.cpu.test_dispatch_board import W, native_arm
from tests.flows.test_tuning_renew import baseline, promote
from tests.quiet import Quiet

pytestmark = pytest.mark.usefixtures("preforked")

FIRST = dataclasses.replace(Passed(cases=9, worst=0.1, worst_case="random"), pairs=3, pairs_of=40, inputs="some text")


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    with open_ledger(home=tmp_path / "home") as made:
        yield made


def test_a_proof_of_some_rows_states_which_and_the_remaining_rows_complete_it() -> None:
    from autosel.candidates import registry

    proof = built(registry.find("rmsnorm", "cpp:rmsnorm"), W, this_device())
    (found,) = check_all([proof], fp=this_device(), terms=Terms(inputs="some text", pairs=FIRST_PAIRS))
    assert isinstance(found, Passed)
    assert found.pairs == len(FIRST_PAIRS) < found.pairs_of
    assert found.inputs == "some text"


def test_serving_arms_are_proven_on_the_remaining_rows(ledger: Ledger) -> None:
    arm = native_arm()
    d = promote(ledger, arm, parities=[(arm, FIRST)])
    ((left, known),) = ledger.incomplete(d.hw_id, current_mode())
    assert (left.id, known) == (d.id, FIRST)
    (made,) = complete(ledger, this_device(), Quiet())
    assert (made.decision.id, made.reason, made.rows) == (d.id, "", 37)
    proof = ledger.parity_known(d.hw_id, arm.digest, W)
    assert isinstance(proof, Passed)
    assert (proof.pairs, proof.pairs_of, proof.inputs) == (40, 40, "some text")
    assert proof.cases == FIRST.cases + 37
    assert ledger.incomplete() == ()
    assert [s.decision.id for s in ledger.serving()] == [d.id]


def test_an_arm_that_fails_a_remaining_row_is_quarantined_with_the_case(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = native_arm()
    d = promote(ledger, arm, parities=[(arm, FIRST)])
    wrong = Failed(check="elements", case="pairs 1234", reason="element [0]: got 1", evidence={"index": [0]})
    monkeypatch.setattr("autosel.tuning.complete.check_rest", lambda *_, **__: wrong)
    (made,) = complete(ledger, this_device(), Quiet())
    assert made.reason == "parity: elements (pairs 1234): element [0]: got 1"
    held = ledger.quarantined(d.hw_id, "rmsnorm")
    assert held[arm.build].evidence == {"index": [0], "check": "elements", "case": "pairs 1234"}
    (served,) = ledger.serving()
    assert served.decision.arm.digest == baseline().digest
