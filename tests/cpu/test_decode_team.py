"""Test the step by one native call: the bits of the step op by op, Hugging Face's tokens, and no hangs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel import fingerprint, models
from autosel.cli.main import run
from autosel.decode import choose
from autosel.decode.cache import make_cache
from autosel.decode.generate import generate, prefill
from autosel.decode.measure import measure
from autosel.decode.model import Decoder
from autosel.decode.prove import proven_beside
from autosel.decode.run import Plan
from autosel.decode.step import Place, write_step
from autosel.decode.team import TASK_WORDS, TeamStep, ThreadTeam, write_team
from autosel.decode.weights import load_weights
from autosel.ledger import open_ledger
from autosel.ledger.commands import Demote
from autosel.values import Fingerprint
from tests.cpu.test_decode import COUNT, PROMPTS, WINDOW, Oracle, assert_same, compiled, one_thread, oracle
from tests.cpu.test_ledger import record

__all__ = ["compiled", "one_thread", "oracle"]  # fixtures

LONG = 4 * WINDOW  # tokens held: the window cuts, and threads share the keys of a head


@pytest.fixture(scope="module")
def fp() -> Fingerprint:
    return fingerprint.take("cpu")


def threaded(step: TeamStep, threads: int) -> TeamStep:
    """Run the step with this many threads; a model this small would get one."""
    times = torch.zeros(threads, len(step.tasks), 2, dtype=torch.int64)
    return dataclasses.replace(step, threads=threads, times=times)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def team_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give every written team this many threads."""
    monkeypatch.setattr("autosel.decode.team.write_team", lambda *a, **k: threaded(write_team(*a, **k), request.param))
    return int(request.param)


@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["one", "three of different lengths"])
def test_a_teams_tokens_and_logits_are_those_of_transformers(
    oracle: Oracle, fp: Fingerprint, rows: list[int], team_of: int
) -> None:
    made = generate(oracle.decoder(), [oracle.prompts[r] for r in rows], COUNT, keep_logits=True, form="whole", fp=fp)
    assert_same(oracle, made, rows)


def in_turn(decoder: Decoder, oracle: Oracle, fp: Fingerprint, threads: int, rows: int) -> Iterator[tuple[Any, Any]]:
    """Run both kinds of step from the same prompt, alternating at every token."""
    caches = [make_cache(decoder.shape, decoder.weights.dtype, rows=rows, room=LONG + 40) for _ in range(2)]
    prompts = [(p * 9)[: LONG - i] for i, p in enumerate(oracle.prompts[:rows])]
    with torch.inference_mode():
        for cache in caches:
            prefill(decoder, cache, prompts)
        places = [Place.at(torch.zeros(rows, dtype=torch.int64), [len(p) for p in prompts]) for _ in caches]
        ops, listed = (write_step(decoder, c, p) for c, p in zip(caches, places, strict=True))
        team = threaded(write_team(listed, fp), threads)
        for i in range(12):
            for place in places:
                place.tokens.copy_(torch.arange(rows) * 7 + i)
            ops.run()
            team.run()
            yield ops, team
            for place in places:
                place.advance()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_team_leaves_the_bits_that_the_ops_leave(
    oracle: Oracle, fp: Fingerprint, compiled: set[str], dtype: Any, rows: int
) -> None:
    for ops, team in in_turn(oracle.decoder(dtype), oracle, fp, threads=1, rows=rows):
        assert torch.equal(ops.logits, team.logits)
        for name in ("k", "v"):
            held = zip(getattr(ops.cache, name), getattr(team.cache, name), strict=True)
            assert all(torch.equal(a, b) for a, b in held)
    assert {"cpp:norm_qkv", "cpp:gemv", "cpp:gate_up", "cpp:attn_decode", "cpp:lm_head"} <= compiled


def test_sharing_a_step_among_threads_does_not_change_the_result(oracle: Oracle, fp: Fingerprint) -> None:
    """Use more threads than KV heads, so that several threads share the keys of a head, and merge."""
    found: dict[int, list[Tensor]] = {}
    for threads in (1, 2, 5):
        found[threads] = []
        for _, team in in_turn(oracle.decoder(), oracle, fp, threads=threads, rows=2):
            found[threads].append(team.logits.clone())
            assert team.kept[-1].tolist() == team.logits.argmax(-1).tolist(), "the chosen tokens"
    for one, two, five in zip(found[1], found[2], found[5], strict=True):
        assert (two - one).abs().max() < 1e-4 and (five - one).abs().max() < 1e-4
        assert two.argmax(-1).tolist() == one.argmax(-1).tolist() == five.argmax(-1).tolist()


# --- what must not go wrong ------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(oracle: Oracle, fp: Fingerprint) -> TeamStep:
    decoder = oracle.decoder()
    cache = make_cache(decoder.shape, "fp32", rows=1, room=PROMPTS[0])
    with torch.inference_mode():
        return threaded(write_team(write_step(decoder, cache, Place.at(torch.tensor([3]), [8])), fp), 2)


def test_a_step_that_would_leave_its_tensors_is_refused_and_the_next_one_runs(tiny: TeamStep) -> None:
    with torch.inference_mode():
        tiny.run()
        expected = tiny.logits.clone()
        tiny.place.tokens.fill_(10**6)
        with pytest.raises(ValueError, match="token 1000000 of"):
            tiny.run()
        tiny.place.tokens.fill_(3)
        tiny.place.advance(1000)
        with pytest.raises(ValueError, match="of a cache of"):
            tiny.run()
        tiny.place.advance(-1000)
        tiny.run()
    assert torch.equal(tiny.logits, expected)


@pytest.mark.parametrize("last", [False, True], ids=["at the first barrier", "at the last task"])
def test_a_failed_thread_fails_the_step_without_a_hang(tiny: TeamStep, last: bool) -> None:
    """Use rows that are too long for any memory, which only the threads can notice."""
    with torch.inference_mode():
        tiny.run()
        expected = tiny.logits.clone()
        kept = tiny.program.clone()
        projections = [i for i, words in enumerate(kept.tolist()) if words[0] == 1]
        place = projections[-1 if last else 0] * TASK_WORDS + 4  # k, behind kind, words, rows and n
        tiny.program.view(-1)[place] = 1 << 58
        for _ in range(3):
            with pytest.raises(ValueError, match="out of memory"):
                tiny.run()
        tiny.program.copy_(kept)
        tiny.run()
    assert torch.equal(tiny.logits, expected)


def test_tasks_of_another_layout_are_refused(tiny: TeamStep) -> None:
    with torch.inference_mode():
        tiny.program[1, 1] += 1
        with pytest.raises(ValueError, match="disagree about a task"):
            tiny.run()
        tiny.program[1, 0] = 77
        with pytest.raises(ValueError, match="no task of kind 77"):
            tiny.run()


# --- a measured run --------------------------------------------------------------------------------------------------


# Measuring a run does not depend on the family; this one has every kind of task.
one_family = pytest.mark.parametrize("oracle", ["gemma3"], indirect=True)


def plan_of(oracle: Oracle, **changes: Any) -> Plan:
    shape = models.load(oracle.folder)
    return Plan(model=shape, weights=str(oracle.folder), seq=30, iters=4, warmup=1, **({"dtype": "fp32"} | changes))


@one_family
def test_a_forced_team_is_measured_and_reported(oracle: Oracle) -> None:
    plan = plan_of(oracle, step="whole", batch=2, advance=True)
    made = measure(plan, load_weights(plan))
    assert made.mode_key.startswith("team.") and made.max_logit_error <= made.logit_bound
    assert made.tokens_equal == made.tokens_checked
    assert [(w.half, w.form, w.taken) for w in made.ways] == [("step", "ops", False), ("step", "team", True)]
    assert {c.backend for c in made.choices} == {"CPP"}
    attention = [t for t in made.per_op if t.op == "attn"]
    assert sum(t.count_per_step for t in attention) == plan.layers_run and all(t.median_us > 0 for t in attention)


@one_family
def test_a_team_without_decided_or_proven_kernels_is_not_raced(oracle: Oracle) -> None:
    plan = plan_of(oracle)
    made = measure(plan, load_weights(plan))
    assert made.mode_key.startswith("eager.") and not any(w.half == "step" for w in made.ways)
    assert any("no thread team: " in note and "use --step whole to require it" in note for note in made.notes)


@one_family
def test_a_team_is_raced_if_its_kernels_were_proven_here_and_did_not_win_alone(oracle: Oracle, fp: Fingerprint) -> None:
    plan, weights = plan_of(oracle), load_weights(plan_of(oracle))
    cache = make_cache(plan.shape, "fp32", rows=1, room=40, page=0, device=weights.device)
    ops = write_step(Decoder(weights), cache, Place.at(torch.tensor([1]), [29]))

    def why(*proven: str) -> str:
        return ThreadTeam().reluctant(ops, ops, plan, fp, lambda _: proven)

    assert why() == "attn is served by torch:sdpa, not by cpp:attn_decode"
    assert why("cpp:attn_decode", "cpp:lm_head") == "linear is served by torch:linear, not by cpp:gemv"
    assert why("cpp:gemv", "cpp:lm_head", "cpp:attn_decode") == ""


@one_family
@pytest.mark.parametrize(("gain", "taken"), [(1.5, True), (1.001, False)])
def test_a_team_is_used_if_its_kernels_serve_and_it_wins(
    oracle: Oracle, compiled: set[str], monkeypatch: pytest.MonkeyPatch, gain: float, taken: bool
) -> None:
    monkeypatch.setattr(choose, "step_medians", lambda *_: [1e6 * gain, 2e6, 1e6])  # the ops, PyTorch and the team
    plan = plan_of(oracle)
    made = measure(plan, load_weights(plan))
    assert made.mode_key.startswith("team." if taken else "eager.")
    assert [w.taken for w in made.ways if w.half == "step"] == [not taken, False, taken]
    assert measure(dataclasses.replace(plan, step="ops"), load_weights(plan)).mode_key.startswith("eager.")


@one_family
def test_a_certificate_of_a_team_names_it_and_verifies(oracle: Oracle, tmp_path: Path) -> None:
    to = ("--certify", str(tmp_path / "c.jsonl"), "--audit", str(tmp_path / "audit.json"))
    asked = ("--seq", "30", "--iters", "5", "--warmup", "1", "--dtype", "fp32", "--persistent", *to)
    assert run(["run", "--model", str(oracle.folder), *asked, "--json"]) == 0
    made = json.loads((tmp_path / "c.jsonl").read_bytes())
    assert made["mode"].startswith("team.") and made["options"]["mode"] == "team" and made["verification_ok"]
    assert "--persistent" in made["repro_cmd"] and made["python_overhead"] > 0
    found = json.loads((tmp_path / "audit.json").read_text())
    assert [(a["op"], a["taken"], a["other"]) for a in found["attribution"]] == [("step", "team", "ops")]
    assert {"attn", "lm_head", "gate_up"} <= {r["label"] for r in found["rows"] if r["time_us"] > 0}
    assert run(["verify", str(tmp_path / "c.jsonl")]) == 0


@pytest.mark.parametrize("state", ["kept", "promoted"])
def test_kernels_count_as_proven_whichever_of_them_won(state: str, tmp_path: Path) -> None:
    """With eight rows `gemm` wins some projections alone; the whole step on `gemv` may still win."""
    with open_ledger(home=tmp_path) as ledger:
        assert proven_beside(ledger, record(ledger, state=state)) == {"cpp:attn"}


def test_a_withdrawn_decision_proves_no_kernel(tmp_path: Path) -> None:
    with open_ledger(home=tmp_path) as ledger:
        withdrawn = ledger.write(Demote(decision_id=record(ledger).id, reason="wrong once"))
        assert proven_beside(ledger, withdrawn) == set()
