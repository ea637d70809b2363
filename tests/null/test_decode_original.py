"""Test the original model's results on a text, and that a format is scored against them by the timed step."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import models
from autosel.certify.run import RunRequest
from autosel.decode.cache import make_cache
from autosel.decode.checkpoint import write_checkpoint
from autosel.decode.measure import measure
from autosel.decode.original import WINDOW, original, plan_of, scored, text_windows
from autosel.decode.reference import Reference
from autosel.decode.run import FEWEST_TOKENS, Plan, Text
from autosel.decode.weights import load_weights
from autosel.errors import UsageError
from tests import steps
from tests.null.checkpoints import edit_config

FORMAT = "int4-g32"


def text(count: int) -> Text:
    tokens = tuple((7 * i + i * i // 3) % steps.VOCABULARY for i in range(count))
    return Text(name="t.json", sha256="0" * 64, tokenizer="ids", tokens=tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("original")
    steps.write_model(made / "m", "llama")
    write_checkpoint(made / "m", FORMAT, made / "q")
    return made


def plan(folder: Path, name: str = "q", **changes: Any) -> Plan:
    model = models.load(folder / name)
    asked: dict[str, Any] = {"seq": 8, "iters": 2, "warmup": 0, "step": "ops", "dtype": "fp32"} | changes
    return Plan(model=model, weights=str(folder / name), **asked)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("count", [2 * 40, 500, 4097, 4200, 100_000])
@pytest.mark.parametrize("context", [64, 512, 8192])
def test_windows_are_equal_consecutive_and_whole_batches(rows: int, count: int, context: int) -> None:
    tokens = tuple(range(count))
    found = text_windows(tokens, rows, context)
    each = len(found[0]) - 1
    assert len(found) % rows == 0 and {len(w) for w in found} == {each + 1} and 1 <= each <= min(WINDOW, context)
    assert [t for w in found for t in w[:-1]] == list(range(len(found) * each))
    assert all(w[-1] == w[-2] + 1 for w in found)
    assert scored(tokens, rows, context) == len(found) * each
    if count >= 4200 and rows < 40:
        assert scored(tokens, rows, context) >= FEWEST_TOKENS


def test_logits_are_those_of_the_plain_weights_in_fp32(folder: Path) -> None:
    asked, said = plan(folder), text(200)
    known = original(asked, said, str(folder / "m"))
    weights = load_weights(Plan(model=models.load(folder / "m"), weights=str(folder / "m"), dtype="fp32"))
    eager = Reference(weights, torch.float32)
    nothing = make_cache(weights.shape, "fp32", rows=len(known.windows), room=1)
    with torch.inference_mode():
        exact = eager.times(eager.hidden(known.windows[:, :-1], nothing, 0), weights.head)
    found = known.logits(slice(2, 4), slice(1, 5))
    assert torch.allclose(found, exact[2:4, 1:5], rtol=1e-5, atol=1e-5)
    assert known.stored == "" and known.hidden.dtype == torch.float32


@pytest.mark.parametrize("batch", [1, 2])
def test_a_format_is_scored_against_the_original_by_the_timed_step(folder: Path, batch: int) -> None:
    asked, said = plan(folder, batch=batch), text(150)
    run = measure(asked, load_weights(asked), text=said, original=original(asked, said, str(folder / "m")))
    found = run.format_quality
    assert found is not None and run.quality is not None
    assert found.original == str(folder / "m") and found.tokens == scored(said.tokens, batch, 512)
    assert run.quality.mean_divergence < 1e-4 < found.mean_divergence <= found.p999_divergence <= found.max_divergence
    assert math.log(found.perplexity / found.original_perplexity) == pytest.approx(found.difference)
    own = original(replace(asked, model=models.load(folder / "m")), said, str(folder / "m"))
    plain = plan(folder, "m", batch=batch)
    same = measure(plain, load_weights(plain), text=said, original=own).format_quality
    assert same is not None and same.mean_divergence < 1e-6 and same.same_first == 1.0
    assert same.original_perplexity == pytest.approx(found.original_perplexity)


def test_another_model_is_no_original(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "m", tmp_path / "other")
    edit_config(tmp_path / "other", intermediate_size=64)
    with pytest.raises(UsageError, match="is another model"):
        plan_of(plan(folder), str(tmp_path / "other"))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "m" / "config.json", bare)
    with pytest.raises(UsageError, match="has no weights"):
        plan_of(plan(folder), str(bare))


# --- a request -------------------------------------------------------------------------------------------------------


def test_weights_that_a_run_rounds_are_compared_with_themselves(folder: Path) -> None:
    rounded = plan(folder, "m")
    rounded = replace(rounded, model=models.stored_as(rounded.model, FORMAT))
    asked = RunRequest(plan=rounded, repro_cmd="autosel run", text=text(5000))
    assert asked.compared_with == str(folder / "m")
    assert RunRequest(plan=plan(folder, "m"), repro_cmd="autosel run", text=text(90)).compared_with == ""
    assert RunRequest(plan=plan(folder), repro_cmd="autosel run", text=text(90)).compared_with == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"original": "m"}, "--original needs --quality"),
        ({"original": "m", "text": text(300)}, "at least 4096 are needed"),
        ({"original": "gone", "text": text(5000)}, "gone"),
    ],
)
def test_a_request_that_cannot_be_judged_is_refused_at_once(folder: Path, changes: dict[str, Any], told: str) -> None:
    changes = changes | {"original": str(folder / changes["original"])}
    with pytest.raises(UsageError, match=told):
        RunRequest(plan=plan(folder), repro_cmd="autosel run", **changes)
    if "4096" in told:
        RunRequest(plan=plan(folder), repro_cmd="autosel run", accept_quality=True, **changes)


def test_random_weights_have_no_original(folder: Path) -> None:
    random = replace(plan(folder), weights="random")
    with pytest.raises(UsageError, match="random weights have no original"):
        RunRequest(plan=random, repro_cmd="autosel run", text=text(5000), original=str(folder / "m"))
