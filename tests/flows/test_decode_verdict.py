"""Test a run whose optimised arm chooses other tokens than the baseline, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch, models, ops
from autosel.certify.audit import audit
from autosel.certify.certificate import checksum, decode, field_digests
from autosel.certify.derive import verified, wrong_tokens
from autosel.certify.issue import IssueRequest, issue
from autosel.certify.verify import wrong
from autosel.cli.certificate import summary
from autosel.decode import arms
from autosel.decode.arms import AtOnce, WrittenArm
from autosel.decode.measure import measure
from autosel.decode.run import DecodeRun, Plan, Sampling, Text
from autosel.decode.weights import Weights, load_weights
from autosel.errors import UsageError
from autosel.testing.serving import serve
from autosel.values import canonical_json, to_json
from tests.llama import write_config
from tests.null.certificates import certificate, decode_run

VOCABULARY = 128
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "torch_dtype": "float32"}
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=5)
Said = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"), **SIZES)


def ran(folder: Path, change: Callable[[Weights], Any] = id, **changes: Any) -> DecodeRun:
    asked: dict[str, Any] = {"seq": 20, "iters": 6, "warmup": 0, "advance": True, "step": "ops"} | changes
    plan = Plan(model=models.load(folder), dtype="fp32", **asked)
    weights = load_weights(plan)
    with torch.inference_mode():
        change(weights)
    return measure(plan, weights)


def says(monkeypatch: pytest.MonkeyPatch, arm: Any, step: int, change: Callable[[int], int]) -> None:
    """Make the arm's first row choose another token at this step, counted from 0."""
    honest, steps = arm.tokens, []

    def stepped(self: Any) -> Said:
        steps.append(0)
        said: Said = honest(self)
        if len(steps) == step + 1:
            said[0][-1] = change(said[0][-1])
        return said

    monkeypatch.setattr(arm, "tokens", stepped)


def certified(run: DecodeRun) -> Any:
    """Return the verification of a certificate in which everything else is correct."""
    fields = ("tokens_checked", "tokens_equal", "tokens_open", "max_logit_error", "logit_bound")
    steps = {"batch": run.plan.batch, "iters": run.tokens_checked // run.plan.batch, "step_ms": 90.0}
    return certificate(decode_run(**{name: getattr(run, name) for name in fields}, **steps))


def far(token: int) -> int:
    return (token + VOCABULARY // 2) % VOCABULARY


def twins(weights: Weights) -> None:
    """Give tokens 0 and 1, 2 and 3, ... the same logit."""
    weights.head[1::2] = weights.head[::2]


def twin(token: int) -> int:
    return token ^ 1


def test_a_token_that_the_logits_do_not_allow_leaves_the_run_unverified(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, WrittenArm, 3, far)
    run = ran(folder, batch=2)
    assert (run.tokens_checked, run.tokens_equal, run.tokens_open) == (12, 11, 0)
    assert run.max_logit_error > run.logit_bound
    assert not certified(run).verification_ok and wrong_tokens(certified(run)) == 1


@pytest.mark.parametrize("baseline", [True, False])
def test_a_token_whose_order_the_bound_leaves_open_may_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch, baseline: bool
) -> None:
    says(monkeypatch, WrittenArm, 3, twin)
    run = ran(folder, twins, baseline=baseline)
    assert issue(run, {}, IssueRequest(repro_cmd="autosel run")).verification_ok
    assert run.tokens_equal == 5 and run.tokens_open == 1
    assert run.max_logit_error <= run.logit_bound and certified(run).verification_ok


def test_at_a_fixed_context_one_reference_judges_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autosel.decode.scene import Scene

    asked, honest = [], Scene.after

    def after(self: Scene, tokens: Any, *, wider: bool = False) -> Any:
        asked.append(wider)
        return honest(self, tokens, wider=wider)

    monkeypatch.setattr(Scene, "after", after)
    for step in (2, 4):
        says(monkeypatch, WrittenArm, step, twin)
    run = ran(folder, twins, advance=False)
    assert run.tokens_equal == 4 and run.tokens_open == 2 and asked == [True]


def test_a_token_that_no_draw_gives_leaves_the_run_unverified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, AtOnce, 3, far)
    run = ran(folder, prealloc=False, sampling=SAMPLED)
    assert (run.tokens_equal, run.tokens_open) == (5, 0) and run.max_logit_error <= run.logit_bound
    assert not certified(run).verification_ok


def test_drawn_tokens_that_follow_from_logits_within_the_bound_may_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, arms.Baseline, 3, far)
    run = ran(folder, prealloc=False, sampling=SAMPLED)
    assert (run.tokens_equal, run.tokens_open) == (5, 1) and certified(run).verification_ok


@pytest.fixture
def foreseen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return twelve tokens of plain decoding, and drafts that are always right."""
    said: list[int] = []
    honest = WrittenArm.tokens

    def heard(self: WrittenArm) -> Said:
        found = honest(self)
        said.append(found[0][0])
        return found

    with monkeypatch.context() as patched:
        patched.setattr(WrittenArm, "tokens", heard)
        ran(folder, iters=12)
    monkeypatch.setattr(arms, "draft", lambda text, count: said[len(text) - 20 :][:count])
    return said


@pytest.mark.parametrize(
    "changes",
    [{}, {"cache": "paged", "page": 16}, {"baseline": False}],
    ids=["contiguous", "paged", "without a baseline"],
)
def test_all_tokens_that_speculation_keeps_are_compared_with_plain_greedy_decoding(
    folder: Path, changes: dict[str, Any], foreseen: list[int]
) -> None:
    run = ran(folder, iters=12, speculate=3, **changes)
    assert run.tokens_per_step == 4 and run.tokens_checked == run.tokens_equal == len(foreseen)


def test_a_draft_that_is_kept_and_wrong_leaves_the_run_unverified(
    folder: Path, foreseen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gullible(drafted: list[int], chosen: list[int]) -> list[int]:
        return [chosen[0], *map(far, chosen[1:])]

    monkeypatch.setattr(arms, "accepted", gullible)
    run = ran(folder, iters=12, speculate=3)
    assert run.tokens_checked == 12 > run.tokens_equal and run.max_logit_error > run.logit_bound
    assert not certified(run).verification_ok and foreseen


ALONE: dict[str, Any] = {"baseline": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2},
        {"advance": False},
        {"iters": 40, "batch": 2},
        {"prealloc": False, "sampling": SAMPLED, "warmup": 3},
        {"advance": False, "sampling": SAMPLED, "warmup": 3},
    ],
    ids=["advancing", "fixed", "several passes", "sampled", "sampled at a fixed context"],
)
def test_without_a_baseline_every_token_is_compared_with_passes_of_pytorch(
    folder: Path, changes: dict[str, Any]
) -> None:
    run = ran(folder, **ALONE, **changes)
    assert run.baseline is None and run.tokens_checked == run.tokens_equal == run.plan.iters * run.plan.batch
    assert run.logit_bound > 0 and run.max_logit_error <= run.logit_bound
    made = issue(run, {}, IssueRequest(repro_cmd="autosel run"))
    assert wrong(made) == "" and made.verification_ok and made.verification.against == "passes"
    assert made.baseline is None and made.speedup is None and made.baseline_ttft_ms is None


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("step", [0, 3, 17])
def test_without_a_baseline_a_wrong_token_leaves_the_run_unverified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, advance: bool
) -> None:
    says(monkeypatch, WrittenArm, step, far)
    run = ran(folder, batch=2, iters=20, advance=advance, **ALONE)
    assert (run.tokens_checked, run.tokens_equal, run.tokens_open) == (40, 39, 0)
    assert not issue(run, {}, IssueRequest(repro_cmd="autosel run")).verification_ok


def test_a_run_without_a_baseline_excludes_pages(folder: Path) -> None:
    with pytest.raises(UsageError, match="--no-baseline and --paged are mutually exclusive"):
        ran(folder, cache="paged", **ALONE)


def test_a_certificate_of_version_3_is_read_and_its_tokens_are_not_judged() -> None:
    made = certificate(decode_run(tokens_equal=48))
    assert not verified(made) and wrong_tokens(made) == 2
    assert verified(replace(made, version=3))
    document = to_json(replace(made, version=3))
    del document["verification"]["tokens_open"], document["prompt"]
    document |= {"verification_ok": True, "signature": None}
    document["field_digests"] = field_digests({k: v for k, v in document.items() if k != "field_digests"})
    document["checksum"] = checksum(document)
    read = decode(canonical_json(document))
    assert read.verification.tokens_open is None and wrong(read) == ""


def test_a_text_is_scored_up_to_the_models_context_with_a_note(folder: Path) -> None:
    model = replace(models.load(folder), max_context=32)
    plan = Plan(model=model, dtype="fp32", seq=20, iters=2, warmup=0, step="ops", batch=2)
    text = Text(name="t.json", sha256="0" * 64, tokenizer="ids", tokens=tuple(range(100)))
    run = measure(plan, load_weights(plan), text=text)
    assert run.quality is not None and run.quality.tokens == 2 * 31
    assert "of each row's 50 tokens of t.json the first 32 were scored: the model has no longer context" in run.notes


def test_a_run_with_another_number_of_threads_names_the_decided_one(folder: Path, tmp_path: Path) -> None:
    w = ops.find("lm_head").workload("fp32", {"M": 1, "V": VOCABULARY, "d": 64})
    home, threads = serve(tmp_path, [(w, "cpp:lm_head")]), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with dispatch.use(home):
            made = issue(ran(folder), {}, IssueRequest(repro_cmd="autosel run"))
    finally:
        torch.set_num_threads(threads)
    told = f"tuned with {threads} threads, running with {threads + 1}"
    assert made.per_op["lm_head"].candidate == "torch:lm_head" and made.per_op["lm_head"].reason == told
    assert f"{told}: PyTorch serves all of them" in " ".join(summary(made, audit(made)).split())
