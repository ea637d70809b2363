"""Test decisions about the whole step: raced once, then served without a race until something that they depend on
changes.

The steps are real but their times are simulated, so that the result of a race does not depend on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autosel import fingerprint, models, settings
from autosel.candidates import registry
from autosel.certify.certificate import seal
from autosel.certify.issue import IssueRequest, issue
from autosel.certify.verify import wrong
from autosel.cli.main import run
from autosel.decode import packed, race, team
from autosel.decode.account import AS_IT_WAS
from autosel.decode.measure import measure
from autosel.decode.question import OPS, TORCH
from autosel.decode.run import FUSED, DecodeRun, Plan, Sampling
from autosel.decode.team import CANDIDATE, PACKED
from autosel.decode.weights import load_weights
from autosel.ledger.commands import Demote
from autosel.ledger.store import Ledger, open_ledger
from autosel.models.cost import bytes_per_step
from autosel.values import Passed, Rejected
from tests.cpu.test_decode import compiled, one_thread
from tests.homes import furnish

__all__ = ["compiled", "one_thread"]  # fixtures

STEP_NS = 20e6
Timed = Callable[..., list[str]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Make the team faster than op by op by this factor, the team on packed weights by its square, and PyTorch half as
    fast; return the arms that were sampled."""

    def set_ratio(ratio: float, pytorch: float = 0.5) -> list[str]:
        asked: list[str] = []
        noise = Random(3)

        def sample(self: Any, arm: str, calls: int) -> float:
            asked.append(arm)
            self.written[arm].run()
            faster = {TORCH: pytorch, CANDIDATE: ratio, PACKED: ratio * ratio}.get(arm, 1.0)
            return STEP_NS / faster * noise.gauss(1.0, 0.001)

        monkeypatch.setattr(race.StepSeat, "_sample", sample)
        monkeypatch.setattr(race.StepSeat, "probe", lambda _: 1e12)
        monkeypatch.setattr(race, "watch", lambda: None)  # real waits for a core do not change the simulated times
        return asked

    return set_ratio


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a new ledger; compiled kernels and measured rates are shared."""
    made = furnish(tmp_path / "home")
    monkeypatch.setenv("AUTOSEL_HOME", str(made))
    settings.read.cache_clear()
    yield made
    monkeypatch.undo()
    settings.read.cache_clear()


@pytest.fixture
def ledger(home: Path) -> Iterator[Ledger]:
    with open_ledger() as made:
        yield made


@pytest.fixture
def plan(compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a plan of one small layer, because the rules do not depend on the model."""
    monkeypatch.setattr("autosel.decode.choose.choose_chain", lambda *_: (FUSED, ()))
    whole = models.load("llama-1b")
    sizes = {"layers": 1, "d": 128, "Hq": 2, "Hkv": 1, "D": 64, "I": 256, "V": 512}
    rope = replace(whole.rope, rotary_dim=64)
    shape = replace(whole, name="tiny", **sizes, rope=rope, layer_types=("full",))
    return Plan(model=shape, dtype="fp32", seq=30, iters=2, warmup=0)


@pytest.fixture
def packable(plan: Plan) -> Plan:
    """Return a plan in the dtype whose weights a team can read packed; skip if this CPU has no such kernel."""
    if isinstance(support := packed.supports("bf16", fingerprint.take("cpu")), Rejected):
        pytest.skip(support.reason)
    return replace(plan, dtype="bf16")


def measured(plan: Plan, ledger: Ledger) -> DecodeRun:
    return measure(plan, load_weights(plan), ledger=ledger)


def test_a_race_that_the_team_wins_is_a_decision_that_the_next_run_uses_without_a_race(
    plan: Plan, home: Path, timed: Timed, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = timed(1.1)
    with open_ledger() as ledger:
        first = measured(plan, ledger)
        assert first.mode_key.startswith("team.") and set(asked) == {OPS, TORCH, CANDIDATE}
        (decision,) = ledger.history("step")
        evidence = ledger.evidence(decision.id)
        asked.clear()
        second = measured(plan, ledger)
        measured(replace(plan, seq=28), ledger)  # another context of the bucket
    assert decision.state == "promoted" and decision.mode.startswith("team.") and decision.arm.candidate == CANDIDATE
    assert evidence.race is not None and [s.kind for s in evidence.race.sessions] == ["screening"] + ["confirming"] * 3
    assert [type(p) for arm, p in evidence.parities if arm.digest == decision.arm.digest] == [Passed]
    assert decision.verdict is not None and decision.verdict.effect is not None
    assert decision.verdict.effect.median == pytest.approx(1.1, rel=0.01)
    assert asked == [] and second.mode_key == first.mode_key
    assert any(f"decision {decision.id}: " in note for note in second.notes)
    assert [(w.form, w.taken) for w in second.ways] == [("ops", False), ("torch", False), ("team", True)]
    for words in ["best"], ["explain"], ["explain", "--history"]:
        assert run([*words, "step"]) == 0
        said = capsys.readouterr().out
        assert "promoted" in said or "team" in said, said
    assert run(["best", "step", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "promoted"
    assert run(["explain", "step", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["stale"] == ""


def test_a_race_that_the_team_does_not_win_is_stored_and_not_repeated(plan: Plan, ledger: Ledger, timed: Timed) -> None:
    asked = timed(0.98)
    first = measured(plan, ledger)
    (decision,) = ledger.history("step")
    asked.clear()
    second = measured(plan, ledger)
    assert (decision.state, decision.arm.candidate) == ("kept", OPS)
    assert asked == [] and {first.mode_key[:6], second.mode_key[:6]} == {"eager."}
    assert any("op by op" in note and f"decision {decision.id}" in note for note in second.notes)


def test_pytorch_runs_the_step_if_none_of_our_forms_is_faster(plan: Plan, ledger: Ledger, timed: Timed) -> None:
    asked = timed(0.98, pytorch=1.1)
    first = measured(plan, ledger)
    (decision,) = ledger.history("step")
    asked.clear()
    second = measured(plan, ledger)
    sampled = measured(replace(plan, sampling=Sampling(temperature=0.8)), ledger)
    assert (decision.state, decision.arm.candidate, decision.arm.backend) == ("promoted", TORCH, "TORCH")
    assert asked == [] and second.mode_key.startswith("torch.")
    replaced = [c for c in second.choices if c.op != "sample"]
    assert replaced and all(c.candidate == registry.baseline(c.op).name for c in replaced)
    assert {c.reason for c in replaced} == {AS_IT_WAS} and second.per_op == ()
    assert second.tokens_equal == second.tokens_checked > 0
    assert "sample" in {c.op for c in sampled.choices}
    for made in (first, second, sampled):
        certificate = issue(made, {}, IssueRequest(repro_cmd="autosel run"))
        assert wrong(certificate) == ""
        claimed = {label: replace(o, decision_id=7) for label, o in certificate.per_op.items() if o.op != "sample"}
        forged = replace(certificate, per_op={**certificate.per_op, **claimed}, decision_ids=(7,))
        assert "PyTorch alone" in wrong(seal(forged))


def test_a_demotion_holds_and_a_changed_kernel_is_raced_again(
    plan: Plan, ledger: Ledger, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = timed(1.1)
    measured(plan, ledger)
    (decision,) = ledger.history("step")
    ledger.write(Demote(decision_id=decision.id, reason="for the test"))
    asked.clear()
    assert measured(plan, ledger).mode_key.startswith("eager.") and asked == []
    edited = team.arm_of
    monkeypatch.setattr(team, "arm_of", lambda *a, **k: replace(edited(*a, **k), digest="e" * 64))
    assert measured(plan, ledger).mode_key.startswith("team.") and asked
    assert [d.state for d in ledger.history("step")] == ["promoted", "demoted", "promoted"]


def test_a_forced_race_decides_again(plan: Plan, ledger: Ledger, timed: Timed) -> None:
    timed(0.98)
    measured(plan, ledger)
    asked = timed(1.1)
    assert measured(plan, ledger).mode_key.startswith("eager.") and asked == []
    assert measure(plan, load_weights(plan), ledger=ledger, forced=True).mode_key.startswith("team.") and asked
    asked.clear()
    assert measured(plan, ledger).mode_key.startswith("team.") and asked == []


def test_packed_weights_are_a_separate_arm_in_the_ledger(
    packable: Plan, ledger: Ledger, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plan = timed(1.1), packable
    first = measured(plan, ledger)
    (decision,) = ledger.history("step")
    raced = ledger.evidence(decision.id).race
    assert {OPS, TORCH, CANDIDATE, PACKED} == set(asked) and decision.arm.candidate == PACKED
    assert decision.arm.knobs["weights"] == packed.layout_format()
    assert raced is not None and any("weights in 12 bits, without loss" in note for note in raced.notes)
    assert [w.form for w in first.ways] == ["ops", "torch", "team", "packed"]
    assert [w.form for w in first.ways if w.taken] == ["packed"]
    assert first.bytes_per_step < bytes_per_step(plan.shape, "bf16", 1, plan.seq)
    assert wrong(issue(first, {}, IssueRequest(repro_cmd="autosel run"))) == ""
    asked.clear()
    second = measured(plan, ledger)
    assert asked == [] and second.bytes_per_step == first.bytes_per_step
    assert any("packed in" in note for note in second.notes)
    plain = measured(replace(plan, layout="plain"), ledger)
    assert "packed" not in {w.form for w in plain.ways} and len(ledger.history("step")) == 1
    monkeypatch.setattr(packed, "free_memory", lambda: 0)
    crowded = measured(plan, ledger)
    assert crowded.bytes_per_step > first.bytes_per_step and crowded.mode_key.startswith("team.") and asked == []
    assert any("no packed weights: they need" in note for note in crowded.notes)
    assert len(ledger.history("step")) == 1


def test_packed_weights_are_raced_once_memory_suffices(
    packable: Plan, ledger: Ledger, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plan = timed(1.1), packable
    with monkeypatch.context() as crowd:
        crowd.setattr(packed, "free_memory", lambda: 0)
        measured(plan, ledger)
        asked.clear()
        assert measured(plan, ledger).mode_key.startswith("team.") and asked == []
    measured(plan, ledger)
    assert PACKED in asked
    assert [d.arm.candidate for d in ledger.history("step")] == [PACKED, CANDIDATE]


def test_a_decision_for_unpacked_weights_packs_none(
    plan: Plan, ledger: Ledger, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(0.98)  # op by op
    plan = replace(plan, dtype="bf16")
    measured(plan, ledger)
    monkeypatch.setattr(packed, "_pack", lambda *_: pytest.fail("packed for nobody"))
    weights = load_weights(plan)
    assert measure(plan, weights, ledger=ledger).mode_key.startswith("eager.")
    assert weights.embedding not in packed._KEPT


def test_a_plan_that_sets_the_form_of_the_step_does_not_read_the_ledger(
    plan: Plan, ledger: Ledger, timed: Timed
) -> None:
    asked = timed(0.5)
    assert measured(replace(plan, step="whole"), ledger).mode_key.startswith("team.")
    assert measured(replace(plan, step="ops"), ledger).mode_key.startswith("eager.")
    assert ledger.history("step") == [] and asked == []


def test_a_team_faster_than_memory_voids_the_session(
    plan: Plan, ledger: Ledger, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1.1)
    monkeypatch.setattr("autosel.decode.race.last_level_bytes", lambda fp: 0)  # for a model of any size
    monkeypatch.setattr(race.StepSeat, "probe", lambda _: 1.0)
    assert measured(plan, ledger).mode_key.startswith("eager.")
    (decision,) = ledger.history("step")
    raced = ledger.evidence(decision.id).race
    assert decision.verdict is not None and decision.verdict.outcome == "undecided"
    assert raced is not None and all("a probe read memory at" in s.voided for s in raced.sessions)
