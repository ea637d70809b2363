"""Test the scored tokens of a text, their fields in a certificate, and the required ones."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import models
from autosel.certify import rerun, verify
from autosel.certify.audit import audit
from autosel.certify.certificate import Certificate
from autosel.certify.issue import refuse_unjudged
from autosel.certify.run_again import text_again
from autosel.cli.certificate import summary
from autosel.cli.verify import command_of, rerun_words
from autosel.decode.prompt import text_to_score
from autosel.decode.quality import MOST_TOKENS, _Scores, windows
from autosel.decode.run import Plan, Quality, Text
from autosel.errors import BadConfig, UsageError
from autosel.values import to_json
from tests.null.certificates import certificate, decode_run

TEXT = Text(name="t.txt", sha256="0" * 64, tokenizer="bytes", tokens=(1, 2, 3))


def scored(timed: torch.Tensor, reference: torch.Tensor, following: list[int]) -> Quality:
    scores = _Scores()
    for i, token in enumerate(following):
        scores.add(timed[i][None], reference[i][None], torch.tensor([token]))
    return scores.quality(TEXT)


def test_perplexity_and_divergence_follow_their_definitions() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    timed = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]).log() + 3.0  # logits: a constant changes nothing
    found = scored(timed, reference, [0, 2])
    assert found.perplexity == pytest.approx(math.sqrt(1 / (0.25 * 0.8)))
    assert found.reference_perplexity == pytest.approx(math.sqrt(1 / (0.5 * 0.8)))
    assert found.difference == pytest.approx(math.log(2) / 2)
    assert found.max_divergence == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found.mean_divergence == pytest.approx(found.max_divergence / 2)
    assert found.same_first == 0.5 and found.tokens == 2


def test_a_path_better_than_the_reference_beyond_noise_is_suspect_and_noise_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(200, 50, generator=generator)
    following = torch.randint(50, (200,), generator=generator).tolist()
    rounded = reference + 0.01 * torch.randn(reference.shape, generator=generator)
    knowing = rounded.clone()
    knowing[range(200), following] += 0.05  # as if it had seen the text
    assert not scored(rounded, reference, following).suspect
    assert scored(knowing, reference, following).suspect
    assert not scored(2 * reference, reference, following).suspect  # worse results are not suspect


def test_rows_read_parts_of_the_text_one_after_the_other() -> None:
    assert windows(range(9), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(windows(range(10_000), 4)) * len(windows(range(10_000), 4)[0]) == MOST_TOKENS


def test_a_text_is_bytes_without_a_tokenizer_and_ids_in_json(tmp_path: Path) -> None:
    plan = Plan(model=models.load("llama-1b"))
    (tmp_path / "t.txt").write_text("Zoë")
    (tmp_path / "t.json").write_text("[[5, 6], [7]]")
    words, ids = text_to_score(tmp_path / "t.txt", plan), text_to_score(tmp_path / "t.json", plan)
    assert (words.tokenizer, words.tokens) == ("bytes", tuple("Zoë".encode()))
    assert (ids.tokenizer, ids.tokens) == ("ids", (5, 6, 7))


def test_the_checkpoints_tokenizer_is_used_where_there_is_one(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 3, "cat": 4, "?": 0}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("the cat the dog")
    found = text_to_score(tmp_path / "t.txt", Plan(model=models.load("llama-1b"), weights=str(tmp_path)))
    assert (found.tokenizer, found.tokens) == ("checkpoint", (3, 4, 3, 0))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [("t.txt", b"x", UsageError), ("t.json", b"[9999999]", UsageError), ("t.txt", b"\xff\xfe", BadConfig)],
)
def test_a_text_that_cannot_be_scored_is_refused(
    tmp_path: Path, name: str, content: bytes, error: type[Exception]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error):
        text_to_score(tmp_path / name, Plan(model=models.load("llama-1b")))


# --- in a certificate ------------------------------------------------------------------------------------------------


QUALITY = Quality(
    text="t.txt",
    text_sha256="0" * 64,
    tokenizer="bytes",
    tokens=100,
    perplexity=10.0 * math.exp(0.01),
    reference_perplexity=10.0,
    difference=0.01,
    difference_error=0.02,
    mean_divergence=0.001,
    max_divergence=0.1,
    same_first=0.99,
)


def with_quality(**changed: Any) -> Certificate:
    made = certificate(dataclasses.replace(decode_run(), quality=QUALITY))
    assert made.quality is not None
    return dataclasses.replace(made, quality={**made.quality, **changed})


def test_a_certificate_contains_the_scores_of_the_text() -> None:
    made = with_quality()
    assert made.quality == {**to_json(QUALITY), "suspect": False}
    assert verify.wrong(made) == ""
    said = summary(made, audit(made))
    words = " ".join(said.split())
    assert "perplexity 10.101, of the fp32 reference 10;" in words and "100 bytes (no tokenizer) of t.txt" in words
    assert "SUSPECT" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_a_suspect_path_is_reported() -> None:
    better = dataclasses.replace(QUALITY, perplexity=10 * math.exp(-0.1), difference=-0.1, difference_error=0.001)
    made = certificate(dataclasses.replace(decode_run(), quality=better))
    assert made.quality is not None and made.quality["suspect"] is True
    assert "SUSPECT" in summary(made, audit(made))


@pytest.mark.parametrize(
    "changed",
    [
        {"suspect": True},
        {"perplexity": 9.0},
        {"perplexity": 0.5, "reference_perplexity": 0.5, "difference": 0.0},
        {"mean_divergence": 0.2},
        {"same_first": 1.5},
        {"tokens": 0},
        {"difference_error": -1.0},
        {"tokens": "many"},
        {"more": 1},
    ],
)
def test_impossible_quality_figures_are_found(changed: dict[str, Any]) -> None:
    assert verify.wrong(with_quality(**changed)).startswith("quality: ")


def test_lossy_arithmetic_is_certified_only_with_a_text() -> None:
    with pytest.raises(UsageError, match="without --quality"):
        refuse_unjudged("fp8_e4m3", judged=False)
    refuse_unjudged("fp8_e4m3", judged=True)
    refuse_unjudged("", judged=False)
    lossy = dataclasses.replace(certificate(decode_run()), dtype="fp8_e4m3")
    assert verify.wrong(lossy) == "quality: fp8_e4m3 is lossy, but no text was scored"


# --- again -----------------------------------------------------------------------------------------------------------


def scored_run(seed: int, **changed: Any) -> Certificate:
    quality = dataclasses.replace(QUALITY, **changed)
    return certificate(dataclasses.replace(decode_run(seed=seed, iters=60), quality=quality))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"difference": 0.05}, ""),  # within the errors of both
        ({"difference": -0.2}, ""),  # better: the certificate marks it if it is suspect
        ({"difference": 0.2}, "nats a token to the reference"),
        ({"mean_divergence": 0.003}, ""),
        ({"mean_divergence": 0.005}, "divergence"),
        ({"reference_perplexity": 10.5}, "other weights"),
    ],
)
def test_a_rerun_scores_the_text_again_and_reports_worse_figures(changed: dict[str, float], why: str) -> None:
    found = rerun.compare(scored_run(1), scored_run(2, **changed))
    assert found.quality is not None
    if not why:
        assert found.quality.why == "" and found.outcome == "reproduced"
        assert "divergence" in rerun_words(scored_run(1), found)
        return
    assert why in found.quality.why and found.outcome == "another quality"
    with pytest.raises(rerun.NotReproduced, match="the certified quality was not reproduced") as raised:
        rerun.judge(found)
    assert raised.value.exit_code == 3


def test_a_certified_text_that_was_not_scored_again_or_is_another_is_refused() -> None:
    plain = certificate(decode_run(seed=2, iters=60))
    for again in (plain, scored_run(2, text_sha256="1" * 64), scored_run(2, tokens=99)):
        with pytest.raises(UsageError, match="not scored again"):
            rerun.compare(scored_run(1), again)
    assert rerun.compare(plain, plain).quality is None
    with pytest.raises(UsageError, match="not the text that was scored"):
        rerun.refuse_other_text(scored_run(1), "1" * 64, "other.txt")


def test_the_text_is_found_by_the_commands_path_or_a_given_one(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc")
    text = text_to_score(tmp_path / "t.txt", Plan(model=models.load("llama-1b")))
    made = dataclasses.replace(
        scored_run(1, text_sha256=text.sha256), repro_cmd=f"./run run --model llama-1b --quality {tmp_path / 't.txt'}"
    )
    asked = command_of(made)
    assert text_again(made, asked.plan(), named=None, then=asked["score"]) == text
    (tmp_path / "t.txt").rename(tmp_path / "moved.txt")
    with pytest.raises(UsageError, match="no longer at"):
        text_again(made, asked.plan(), named=None, then=asked["score"])
    assert text_again(made, asked.plan(), named=tmp_path / "moved.txt", then=asked["score"]) == dataclasses.replace(
        text, name="moved.txt"
    )
    silent = dataclasses.replace(made, repro_cmd="./run run --model llama-1b")
    with pytest.raises(UsageError, match="does not name the file"):
        text_again(silent, asked.plan(), named=None, then=command_of(silent)["score"])
    plain = certificate(decode_run(iters=60))
    with pytest.raises(UsageError, match="scored no text"):
        text_again(plain, asked.plan(), named=tmp_path / "moved.txt", then=asked["score"])
