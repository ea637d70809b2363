"""Judge races that commit 462cf5c recorded again: each gives the recorded verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel.ledger import Ledger, open_ledger
from autosel.ledger.former import BASELINES
from autosel.ledger.store import Evidence
from autosel.race.judge import judge
from tests import earlier


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return open_ledger(home=earlier.copied(tmp_path_factory.mktemp("stored") / "home"), alone=True)


@pytest.fixture(scope="module")
def raced(ledger: Ledger) -> list[Evidence]:
    """Return the decisions with a race; one made by hand shows the race of its predecessor."""
    found = [ledger.evidence(decision.id) for decision in ledger.history()]
    return [e for e in found if e.race is not None and e.decision.verdict is not None]


def test_each_race_gives_the_recorded_verdict_again(raced: list[Evidence]) -> None:
    """Compare outcome, winner, reason, effects, timings and E values; the roofline is added after judging."""
    for evidence in raced:
        race, verdict = evidence.race, evidence.decision.verdict
        assert race is not None and verdict is not None
        said = verdict.reason
        for former, now in BASELINES.items():  # a stored sentence keeps the names of its time
            said = said.replace(former, now)
        found = judge(race)
        # The ratio of the next best is of the same sessions as the effect now; intervals count sessions, and are wider.
        recorded = replace(verdict, roofline=None, reason=said, next_best=found.next_best)
        wider = {"effect": found.effect, "over_incumbent": found.over_incumbent}
        assert found == replace(recorded, **wider), evidence.decision.id
        for effect, former in ((found.effect, verdict.effect), (found.over_incumbent, verdict.over_incumbent)):
            assert (effect is None) == (former is None)
            if effect is not None and former is not None:
                assert effect.median == former.median
                assert effect.lo <= former.lo and former.hi <= effect.hi
        assert (found.next_best is None) == (verdict.next_best is None)


def test_the_recorded_races_show_each_way_that_a_race_ends(raced: list[Evidence]) -> None:
    verdicts = [e.decision.verdict for e in raced if e.decision.verdict is not None]
    assert {v.outcome for v in verdicts} >= {"promote", "lose", "undecided"}
    assert any(v.effect is not None and v.effect.median > 5 for v in verdicts)
    assert any("tail" in v.reason for v in verdicts)
    assert {session.kind for e in raced if e.race for session in e.race.sessions} == {"screening", "confirming"}
    assert len(raced) >= 30


@pytest.mark.parametrize("op", ["attn", "linear", "rmsnorm", "swiglu"])
def test_the_recorded_verdicts_are_those_that_were_shown_then(ledger: Ledger, op: str) -> None:
    """Compare with that version's `explain --json`, so that a change by a migration is found."""
    from autosel.values import to_json

    shown = earlier.said(f"explain-{op}")
    assert shown
    for one in shown:
        evidence = ledger.evidence(one["decision_id"])
        assert to_json(evidence.decision.verdict) == one["verdict"], one["decision_id"]
        assert evidence.decision.workload.key == one["workload"]
