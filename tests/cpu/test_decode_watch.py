"""Test a thread team's steps under the guard: right steps are never suspected, planted faults end its service."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from autosel import dispatch
from autosel.decode.cache import make_cache
from autosel.decode.generate import generate, prefill
from autosel.decode.model import Decoder
from autosel.decode.persistent import serve
from autosel.decode.step import Place, write_step
from autosel.decode.team import ATTEND, EMBED, PROJECT, TeamStep, arm_of, write_team
from autosel.decode.watch import SUSPECT, StepWatch
from autosel.dispatch.board import Board
from autosel.guard import Allowance, Policy
from autosel.ledger.faults import Fault
from autosel.ledger.store import open_ledger
from autosel.values import Decision, DTypeName, Fingerprint, Workload
from tests import drawn
from tests.cpu.test_decode import PROMPTS, Oracle, one_thread, oracle
from tests.cpu.test_decode_team import fp, one_family
from tests.cpu.test_decode_weights_formats import weights
from tests.homes import furnish

__all__ = ["fp", "one_thread", "oracle"]  # fixtures

ROOM = PROMPTS[0] + 40


def watched(oracle: Oracle, fp: Fingerprint, *, dtype: DTypeName = "bf16", rows: int = 1, **given: Any) -> TeamStep:
    """Return the step after the prompts, under a watch that checks one task in ten."""
    decoder = oracle.decoder(dtype)
    cache = make_cache(decoder.shape, dtype, rows=rows, room=ROOM)
    prompts = oracle.prompts[:rows]
    prefill(decoder, cache, prompts)
    place = Place.at(torch.arange(rows) + 3, [len(p) for p in prompts])
    return guarded(write_team(write_step(decoder, cache, place), fp), fp, **given)


def guarded(step: TeamStep, fp: Fingerprint, **given: Any) -> TeamStep:
    asked = {"policy": Policy(spot_rate=0.1), "allowance": Allowance(share=1.0), "decision": None, "random": Random(1)}
    return step.guarded(StepWatch(**{"report": lambda fault: None, **asked, **given}), fp)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_task_of_a_right_step_is_suspected(oracle: Oracle, fp: Fingerprint, dtype: DTypeName, rows: int) -> None:
    step, worst = watched(oracle, fp, dtype=dtype, rows=rows), 0.0
    assert all(step.checks)
    for _ in range(4):
        for task, check in enumerate(step.checks):
            assert check is not None
            step.part(0, task + 1)
            worst = max(worst, *(check(seed) for seed in range(12)))
        step.place.tokens.copy_(step.kept[-1])
        step.place.advance()
    assert worst <= SUSPECT / 2, "more than half of the error at which a task is suspected"


@pytest.mark.parametrize("scale", drawn.share([1.0, 3.5], days=2))
def test_a_step_on_weights_in_a_format_has_checks_of_its_plain_operands(fp: Fingerprint, scale: float) -> None:
    found = weights("int8-row", embedding_scale=scale)
    cache = make_cache(found.shape, "bf16", rows=2, room=16)
    prefill(Decoder(found), cache, [[1, 2, 3], [4, 5, 6]])
    place = Place.at(torch.tensor([7, 8]), [3, 3])
    step = guarded(write_team(write_step(Decoder(found), cache, place), fp), fp)
    has = {task.calls[0].op: check is not None for task, check in zip(step.tasks, step.checks, strict=True)}
    assert has == {"glue": True, "norm_qkv": False, "attn": True, "linear": False, "gate_up": False, "lm_head": False}
    for task, check in enumerate(step.checks):
        step.part(0, task + 1)
        assert check is None or max(check(seed) for seed in range(20)) <= SUSPECT / 2
    step.run()


def test_a_step_that_stops_leaves_the_bits_of_one_that_does_not(oracle: Oracle, fp: Fingerprint) -> None:
    step = watched(oracle, fp)
    step.through()
    expected = step.logits.clone(), step.kept[-1].clone()
    for _ in range(20):
        step.logits.fill_(torch.nan)
        step.run()
        assert torch.equal(step.logits, expected[0]) and torch.equal(step.kept[-1], expected[1])
    assert step.watch is not None and step.watch.checks > 20


# --- faults ----------------------------------------------------------------------------------------------------------

DOUBLED = struct.unpack("q", struct.pack("d", 2.0))[0]
WORDS = {  # kind of a task, a word of it (kernels/cpu/step.cpp), another value
    "another row of the table": (EMBED, 5, lambda words: words[5] + 2 * words[6]),
    "the weights one row off": (PROJECT, 14, lambda words: words[14] + 2 * words[16]),
    "another scale of the scores": (ATTEND, 23, lambda words: DOUBLED),
    "the other style of rotation": (ATTEND, 16, lambda words: 1 - words[16]),
    "keys of one head for all": (ATTEND, 21, lambda words: 0),
}


def plant(step: TeamStep, name: str) -> list[int]:
    """Change the word in every task of the kind, except the output head; return the tasks."""
    kind, word, other = WORDS[name]
    tasks = [i for i, words in enumerate(step.program.tolist()) if words[0] == kind][: -1 if kind == PROJECT else None]
    for task in tasks:
        step.program[task, word] = other(step.program[task].tolist())
    return tasks


@one_family
@pytest.mark.parametrize("name", WORDS)
def test_a_planted_fault_of_a_task_is_found_and_the_step_is_served_op_by_op(
    oracle: Oracle, fp: Fingerprint, name: str
) -> None:
    step, right = watched(oracle, fp), watched(oracle, fp)
    tasks = plant(step, name)
    right.ops.run()
    assert step.watch is not None
    number = 0
    while not step.watch.fault and number < 1000:
        step.run()
        number += 1
    assert number <= 200 / len(tasks), "each checked step finds it with a chance of at least a fourth"
    assert "wrong in 3 of 3 replays" in step.watch.fault
    assert torch.equal(step.logits, right.logits), "the step with the found fault must have right logits"
    checks = step.watch.checks
    step.run()
    assert torch.equal(step.logits, right.logits) and step.watch.checks == checks, (
        "later steps must be right and unchecked"
    )


@one_family
def test_a_fault_is_recorded_and_the_build_is_quarantined(oracle: Oracle, fp: Fingerprint, home: Path) -> None:
    board, seen = Board(furnish(home)), []
    step = watched(oracle, fp)
    decision = decision_of(step, fp)

    def report(fault: Fault) -> None:
        seen.append(fault)
        board.report(fault)

    assert step.watch is not None
    step = dataclasses.replace(step, watch=dataclasses.replace(step.watch, decision=decision, report=report))
    plant(step, "another scale of the scores")
    while not seen:
        step.run()
    board.close()
    with open_ledger() as ledger:
        held = ledger.quarantined(fp.hw_id, "step")
    assert held[step.build].cause == "kernel" and "times its limit" in held[step.build].reason
    assert {"task", "ratio", "control", "replays"} <= set(held[step.build].evidence)


def decision_of(step: TeamStep, fp: Fingerprint) -> Decision:
    arm = arm_of(step.ops, fp)
    assert arm is not None and arm.build == step.build
    return Decision(
        id=1,
        op="step",
        hw_id=fp.hw_id,
        workload=Workload(op="step", dims=(("B", 1), ("L", 64)), dtype="bf16"),
        bucket="step/B1.L64/bf16",
        mode="team.t2.highest",
        arm=arm,
        baseline=arm,
        state="promoted",
        reason="planted",
        created_at="2026-11-25T00:00:00",
        verdict=None,
    )


def test_a_suspicion_that_also_holds_for_the_step_op_by_op_clears_the_team(oracle: Oracle, fp: Fingerprint) -> None:
    step = watched(oracle, fp, limit=1e-9)
    step.through()
    expected = step.logits.clone()
    for _ in range(40):
        step.run()
        assert torch.equal(step.logits, expected)
    assert step.watch is not None and not step.watch.fault and step.watch.limit > 1e-9


def test_a_watch_that_has_no_time_left_checks_nothing(oracle: Oracle, fp: Fingerprint) -> None:
    step = watched(oracle, fp, allowance=Allowance(share=0.0, saved_ns=-1))
    for _ in range(20):
        step.run()
    assert step.watch is not None and step.watch.checks == 0


@one_family
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_a_step_that_generates_is_guarded_unless_the_guard_is_off(
    oracle: Oracle, fp: Fingerprint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on: bool
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("autosel.decode.generate.serve", lambda *a, **k: made.append(serve(*a, **k)) or made[-1])
    with dispatch.use(tmp_path, guard=Policy(on=on)):
        generate(oracle.decoder(), [oracle.prompts[0]], 8, form="whole", fp=fp)
    assert (made[0].watch is not None) == on and (not on or made[0].watch.checks > 0)
