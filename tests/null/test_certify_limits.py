"""Test the limits of what a format may lose, and that a certificate beyond them is refused, marked and rerun."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.certify import rerun, verify
from autosel.certify.audit import audit
from autosel.certify.certificate import Certificate, decode, encode, seal
from autosel.certify.limits import LIMITS, BeyondLimit, beyond, limit_of, refuse_beyond
from autosel.certify.run_again import original_again
from autosel.certify.words import compared_format, unjudged
from autosel.cli.certificate import summary
from autosel.cli.verify import command_of, rerun_words
from autosel.decode.run import FormatQuality, Quality
from autosel.errors import UsageError
from autosel.formats import WEIGHT_FORMATS
from tests.null.certificates import certificate, decode_run
from tests.null.test_decode_quality import QUALITY

GOOD = FormatQuality(
    original="checkpoints/llama",
    stored="",
    tokens=4096,
    perplexity=10.0 * math.exp(0.02),
    original_perplexity=10.0,
    difference=0.02,
    difference_error=0.003,
    mean_divergence=0.004,
    p999_divergence=0.3,
    max_divergence=0.9,
    same_first=0.98,
)
FORMAT = "int4-g128"


def with_format(accepted: bool = False, seed: int = 1, weight: str = FORMAT, **changes: Any) -> Certificate:
    model = dataclasses.replace(models.load("llama-1b"), weight=weight, stored=weight)
    run = decode_run(seed=seed, model=model, iters=60, weights="q")
    quality: Quality = QUALITY
    made = certificate(dataclasses.replace(run, quality=quality, format_quality=GOOD))
    stated = {**dict(made.format_quality or {}), "accepted": accepted, **changes}
    return seal(dataclasses.replace(made, format_quality=stated))


def test_every_format_with_codes_has_a_limit() -> None:
    assert {name for name in WEIGHT_FORMATS if limit_of(name) is None} == {"plain"}
    for name, found in WEIGHT_FORMATS.items():
        assert found.plain or limit_of(name) == LIMITS[found.bits]


@pytest.mark.parametrize(
    ("format", "changes", "told"),
    [
        ("int4-g32", {}, ""),
        ("int4-g32", {"mean_divergence": 0.051}, "mean divergence 0.051 nats a token, 0.05 allowed"),
        ("int4-g32", {"mean_divergence": math.nan}, "mean divergence nan"),
        ("int4-g32", {"difference": 0.05}, "rises by 0.05, 0.045 allowed"),
        ("int4-g32", {"same_first": 0.5}, ""),
        ("int8-row", {}, ""),
        ("int8-row", {"mean_divergence": 0.006}, "0.005 allowed"),
        ("int8-row", {"same_first": 0.96}, "another likeliest token at 4.0%, 3% allowed"),
        ("int8-row", {"difference": 0.2}, ""),
        ("int8-row", {"tokens": 4095}, "4095 tokens were scored; 4096 are needed"),
        ("plain", {"tokens": 1, "mean_divergence": 9.0}, ""),
    ],
)
def test_a_figure_beyond_its_limit_is_named(format: str, changes: dict[str, Any], told: str) -> None:
    q = dataclasses.replace(GOOD, **changes)
    assert told in beyond(format, q) and bool(told) == bool(beyond(format, q))
    refuse_beyond(format, q, accepted=True)
    if not told:
        refuse_beyond(format, q, accepted=False)
        return
    with pytest.raises(BeyondLimit, match=f"{format} loses too much against checkpoints/llama") as raised:
        refuse_beyond(format, q, accepted=False)
    assert raised.value.exit_code == 3 and "--accept-quality" in raised.value.todo


def test_a_certificate_states_the_scores_and_is_read_again() -> None:
    made = with_format()
    assert verify.wrong(made) == ""
    assert decode(encode(made)) == made
    said = " ".join(summary(made, audit(made)).split())
    assert "format: int4-g128 against checkpoints/llama: perplexity 10.202 for 10; divergence 0.004 nats" in said
    assert "0.3 at 99.9 %" in said and "accepted" not in said
    assert b"format_quality" not in encode(certificate(decode_run()))


def test_an_original_that_is_itself_dequantised_is_labelled() -> None:
    told = compared_format(with_format(stored="Q4_1, F32 in m.gguf, dequantised to bf16 when loaded"))
    assert "(Q4_1, F32 in m.gguf, dequantised to bf16 when loaded)" in told


def test_accepted_figures_are_marked_and_others_are_refused() -> None:
    loses = {"mean_divergence": 0.2, "same_first": 0.8}
    assert "accepted beyond its limit: mean divergence 0.2" in compared_format(with_format(True, **loses))
    assert verify.wrong(with_format(True, **loses)) == ""
    assert verify.wrong(with_format(False, **loses)).startswith("format_quality: beyond its limit, but not accepted")


@pytest.mark.parametrize(
    "changes",
    [
        {"perplexity": 9.0},
        {"original_perplexity": 0.5},
        {"mean_divergence": 1.0},
        {"p999_divergence": 1.0},
        {"same_first": 1.5},
        {"tokens": 0},
        {"difference_error": -1.0},
        {"tokens": "many"},
        {"more": 1},
        {"accepted": "yes"},
    ],
)
def test_impossible_figures_are_found(changes: dict[str, Any]) -> None:
    assert verify.wrong(with_format(**changes)).startswith("format_quality: ")


def test_random_weights_in_a_format_have_no_quality() -> None:
    model = dataclasses.replace(models.load("llama-1b"), weight=FORMAT)
    random = certificate(decode_run(model=model))
    assert unjudged(random) == "not applicable: the weights are random"
    assert "quality: not applicable: the weights are random" in summary(random, audit(random))
    assert unjudged(certificate(decode_run())) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"mean_divergence": 0.0159}, ""),
        ({"mean_divergence": 0.017}, "divergence"),
        ({"difference": 0.05}, "nats a token to the original"),
        ({"original_perplexity": 11.0}, "the original itself gives"),
    ],
)
def test_a_rerun_compares_with_the_original_again(changes: dict[str, float], why: str) -> None:
    found = rerun.compare(with_format(), with_format(seed=2, **changes))
    assert found.format is not None and why in found.format.why and bool(why) == bool(found.format.why)
    assert "format " in rerun_words(with_format(), found)
    if why:
        with pytest.raises(rerun.NotReproduced, match="the certified quality was not reproduced"):
            rerun.judge(found)


def test_a_rerun_without_the_original_is_refused(tmp_path: Path) -> None:
    silent = dataclasses.replace(with_format(seed=2), format_quality=None)
    with pytest.raises(UsageError, match="not compared with its original again"):
        rerun.compare(with_format(), silent)
    gone = dataclasses.replace(with_format(), repro_cmd=f"./run run --model llama-1b --original {tmp_path / 'gone'}")
    with pytest.raises(UsageError, match="no longer at"):
        original_again(gone, then=command_of(gone)["original"])
    (tmp_path / "gone").mkdir()
    assert original_again(gone, then=command_of(gone)["original"]) == str(tmp_path / "gone")
    assert original_again(silent, then="x") == ""
