"""Test certificates without a device: sums, limits, bytes, chain, signatures, messages about a changed file."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosel import models
from autosel.certify import audit, capacity, compare, rerun, sign, slo, suite, trace
from autosel.certify import certificate as c
from autosel.certify.certificate import Certificate, decode, encode, seal
from autosel.certify.derive import claimed_interval, derive, physics
from autosel.certify.issue import IssueRequest, chained, issue, peak_flops
from autosel.certify.physics import ImpossibleRun, weigh
from autosel.certify.run import append
from autosel.certify.slo import MissedObjective
from autosel.certify.statistics import median, median_interval, quantile, ratio_interval, speedup_interval
from autosel.certify.store import BadCertificate, lines
from autosel.certify.verify import verify, wrong
from autosel.cli import main
from autosel.decode.run import Plan, PromptDigest, Span
from autosel.errors import AutoselError, BadConfig, TooNoisy, UnknownName, UsageError
from autosel.values import canonical_json, to_json
from tests.forks import forked, result_of
from tests.null.certificates import CEILING, DRAFTED, GROUNDS, READ, certificate, decode_run, fingerprint, rewritten

ROOT = Path(__file__).resolve().parents[2]
SMALL = certificate(decode_run(iters=3))
LINE = encode(SMALL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of three certificates."""
    path = tmp_path / "certificates.jsonl"
    for seed in range(3):
        append(path, certificate(decode_run(iters=3, seed=seed)))
    return path


def document(made: Certificate = SMALL) -> dict[str, Any]:
    found: dict[str, Any] = to_json(made)
    return found


def resealed(changed: dict[str, Any]) -> bytes:
    """Return an edited certificate with a recomputed seal."""
    changed = {**changed, "field_digests": c.field_digests(changed)}
    return canonical_json({**changed, "checksum": c.checksum(changed)})


# --- statistics ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60))
def test_the_median_is_the_middle_of_the_sorted_and_a_quantile_is_a_time_that_was_measured(times: list[int]) -> None:
    below, above = sum(t < median(times) for t in times), sum(t > median(times) for t in times)
    assert below <= len(times) / 2 >= above
    for share in (0.5, 0.9, 0.95, 0.99, 1.0):
        found = quantile(times, share)
        assert found in times
        assert sum(t <= found for t in times) >= share * len(times) - 1e-9
        assert sum(t < found for t in times) < share * len(times)


def test_the_interval_of_a_speedup_covers_the_truth_also_for_correlated_steps() -> None:
    """Draw steps as the true time, times a drifting factor (lag-one correlation .6), times noise."""
    rng, covered, runs = Random(7), 0, 120
    for _ in range(runs):
        wander, ours, theirs = 0.0, [], []
        for _ in range(60):
            wander = 0.6 * wander + rng.gauss(0, 0.02)
            ours.append(math.exp(wander + rng.gauss(0, 0.01)))
            theirs.append(2 * math.exp(wander + rng.gauss(0, 0.03)))
        found = speedup_interval(theirs, ours)
        covered += found.lo <= 2 <= found.hi
    assert covered >= 0.88 * runs  # nominal: 95 %; binomial noise of 120 runs is more than 2 % at most one time in ten


def test_an_interval_has_the_same_bits_in_every_run_and_on_every_machine() -> None:
    times = [Random(3).randrange(10**6, 2 * 10**6) for _ in range(50)]
    assert median_interval(times) == median_interval(times)
    code = f"from autosel.certify.statistics import median_interval as m; print(m({times}))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout
    assert told.strip() == str(median_interval(times))


# --- the figures of a run -----------------------------------------------------------------------------------------


def test_a_certificate_has_the_documented_fields() -> None:
    founding = {
        "git_sha", "device", "sm", "model", "dtype", "shape", "knobs", "iters", "latency_ms", "baseline_ms", "speedup",
        "checksum", "timestamp", "repro_cmd", "tokens_per_sec", "autosel", "per_op", "verification_ok",
    }  # fmt: skip
    added = {"warmup", "layers", "bytes_per_token", "roofline", "decision_ids", "env_id", "previous", "signature"}
    found = document()
    assert founding | added <= set(found)
    assert set(found["latency_ms"]) == {"med", "p95"}
    assert found["shape"]["batch"] == 1
    assert found["autosel"]["gate_up"] == "CPP" and found["autosel"]["rope"] == "TORCH"
    assert found["per_op"]["attn"]["parity"]["cases"] == 47
    assert found["knobs"]["attn"] == {"rows": 8, "tile": 128}


def test_its_figures_follow_from_the_steps() -> None:
    run = decode_run(iters=40, batch=4)
    made = certificate(run)
    med = median(run.optimised_ns) / 1e6
    assert made.latency_ms.med == med
    assert made.tokens_per_sec == pytest.approx(1000 * 4 / med)
    assert made.speedup == pytest.approx(median(run.baseline.ns) / median(run.optimised_ns))
    assert made.speedup_interval.lo < made.speedup < made.speedup_interval.hi
    assert made.bytes_per_token == run.bytes_per_step / 4
    assert made.roofline == pytest.approx(run.bytes_per_step / READ / med * 1e3)
    assert made.peak_tokens_per_sec >= made.tokens_per_sec
    assert (made.read_bytes_per_s, made.read_median_bytes_per_s) == (CEILING, READ)
    assert made.itl_ms.p50 == med  # each of the four sequences waits a whole step
    assert wrong(made) == ""


@pytest.mark.parametrize(("waited", "contended"), [(0, False), (4, False), (5, True), (40, True)])
def test_a_run_is_contended_if_more_than_a_tenth_of_its_pairs_was_disturbed(waited: int, contended: bool) -> None:
    assert certificate(decode_run(iters=40, waited=waited)).contended is contended


def test_a_speculative_runs_speedup_counts_tokens_of_both_arms() -> None:
    """Count a step of 2.5 tokens in twice the time of the baseline's single token as 1.25 times as fast."""
    made = certificate(decode_run(**DRAFTED, step_ms=130.0, speedup=0.5, noise=0.0))
    assert made.tokens_per_step == 2.5 and made.baseline_tokens_per_sec == pytest.approx(1000 / made.baseline_ms)
    assert made.speedup == pytest.approx(1.25) == made.tokens_per_sec / made.baseline_tokens_per_sec
    assert made.speedup_interval.lo < 1.25 < made.speedup_interval.hi, "the number of kept tokens varies"
    assert made.latency_ms.med == pytest.approx(130.0), "the latency of a step must not depend on its tokens"
    earlier = dataclasses.replace(made, version=5, samples=dataclasses.replace(made.samples, kept=()))
    earlier = dataclasses.replace(earlier, **c.values(derive(earlier)))
    assert earlier.speedup == pytest.approx(0.5), "an earlier version states another speedup"
    found = rerun.compare(earlier, made)
    assert found.speedup.certified == found.speedup.measured == pytest.approx(1.25)


def test_the_hosts_time_is_stated_with_a_gpus_time() -> None:
    run = decode_run(iters=40)
    assert run.baseline is not None
    host = {"optimised_host_ns": tuple(2 * ns for ns in run.optimised_ns)}
    theirs = dataclasses.replace(run.baseline, host_ns=tuple(ns + 10**6 for ns in run.baseline.ns))
    made = certificate(dataclasses.replace(run, timed_by="CUDA events", baseline=theirs, **host))
    assert wrong(made) == "" and made.timed_by == "CUDA events"
    assert made.host_ms == pytest.approx(2 * made.latency_ms.med)
    assert made.baseline_host_ms == pytest.approx(made.baseline_ms + 1)
    assert (SMALL.timed_by, SMALL.host_ms, SMALL.samples.optimised_host_ns) == ("host", None, ())
    assert made.tokens_per_sec == certificate(run).tokens_per_sec
    seconds = made.ttft_ms / 1e3 + sum(host["optimised_host_ns"]) / 1e9 if made.ttft_ms else 0
    assert suite.end_to_end(made, 40) == pytest.approx(40 / seconds), "a user waits until the host has the tokens"
    stated = document(made)
    samples = stated["samples"]
    for lie, why in (
        ({"timed_by": "host"}, "timed_by, samples: by 'host', with [40] times of the host"),
        ({"timed_by": "a sundial"}, "timed_by"),
        ({"samples": {**samples, "optimised_host_ns": [1] * 40}}, "samples: a step took longer by CUDA events"),
        ({"samples": {**samples, "baseline_host_ns": []}}, "timed_by, samples"),
        ({"host_ms": 1.0}, "host_ms: it does not follow"),
    ):
        assert wrong(decode(resealed({**stated, **lie}))).startswith(why)


ALONE = decode_run(iters=40, baseline=False)


def test_a_run_without_a_baseline_states_no_speedup() -> None:
    made = certificate(ALONE)
    assert wrong(made) == "" and made.verification_ok and decode(encode(made)) == made
    stated = document(made)
    without = ["baseline_ms", "baseline_p95_ms", "baseline_tokens_per_sec", "speedup", "speedup_interval"]
    assert all(stated[name] is None for name in (*without, "baseline_ttft_ms", "baseline_host_ms"))
    assert stated["samples"]["baseline_ns"] == [] and stated["samples"]["first"] == ""
    assert stated["options"]["baseline"] is False and stated["verification"]["against"] == "passes"
    assert made.baseline is None and claimed_interval(made) is None and not any("baseline" in p for p in physics(made))
    told = document(SMALL)
    assert "baseline" not in told["options"] and "against" not in told["verification"], "other certificates change"


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"speedup": 2.0}, "speedup: it does not follow"),
        ({"baseline_ms": 9.0}, "baseline_ms: it does not follow"),
        ({"options": {}}, "verification: against"),
        ({"baseline_ttft_ms": 3.0}, "verification: against"),
        ({"samples": {"baseline_ns": [10**8] * 40}}, "samples: steps of a baseline"),
        ({"samples": {"first": "1" * 40}}, "samples: steps of a baseline"),
        ({"verification": {"against": "baseline"}}, "verification: against"),
    ],
)
def test_a_part_of_a_baseline_is_refused(lie: dict[str, Any], why: str) -> None:
    stated = document(certificate(ALONE))
    changed = {
        name: {**{k: v for k, v in stated[name].items() if k != "baseline" or name != "options"}, **value}
        if isinstance(value, dict)
        else value
        for name, value in lie.items()
    }
    assert wrong(decode(resealed({**stated, **changed}))).startswith(why)


def test_a_baseline_without_its_steps_is_refused() -> None:
    stated = document(SMALL)
    for samples in ({"baseline_ns": []}, {"baseline_ns": [], "first": ""}):
        assert wrong(decode(resealed({**stated, "samples": {**stated["samples"], **samples}}))).startswith("samples")


def test_runs_without_a_baseline_are_compared_by_their_steps() -> None:
    first, again = (certificate(decode_run(seed=s, iters=40, baseline=False)) for s in (1, 2))
    found = rerun.compare(first, again)
    assert found.speedup is None and found.outcome == "reproduced" and found.figures == (found.time,)
    rerun.judge(found)
    with pytest.raises(UsageError, match="options differs"):
        rerun.compare(first, certificate(decode_run(iters=40)))
    (change,) = compare.compare(compare.of_certificates([first]), compare.of_certificates([certificate()]))
    assert change.interval is not None and change.outcome == "no claim" and change.note == "then with a baseline"
    assert "baseline" in compare.document([change])[0]["differ"]


def test_several_tokens_of_one_stream_share_the_time_of_a_step() -> None:
    made = certificate(decode_run(batch=2, small_batch=True))
    assert made.itl_ms.p50 == pytest.approx(made.latency_ms.med / 2)
    assert made.tokens_per_sec == pytest.approx(2000 / made.latency_ms.med)


def test_a_price_and_an_energy_give_tokens_per_unit_and_are_absent_otherwise() -> None:
    made = certificate(decode_run(energy_joules=3600.0, iters=40), price_per_hour=2.0)
    assert made.cost.tokens_per_dollar == pytest.approx(made.tokens_per_sec * 1800)
    assert made.cost.tokens_per_watt_hour == pytest.approx(40)
    assert set(dataclasses.astuple(SMALL.cost)) == {None}


def test_wrong_logits_or_an_unproven_kernel_leave_a_run_unverified() -> None:
    for changes in ({"max_logit_error": 0.051}, {"tokens_checked": 0}, {"tokens_equal": 49}, {"tokens_open": 1}):
        assert not certificate(decode_run(**changes)).verification_ok, changes  # the last: more open than differ
    assert certificate(decode_run(tokens_equal=49, tokens_open=1)).verification_ok
    unproven = {n: dataclasses.replace(g, parity=None) for n, g in GROUNDS.items()}
    assert not issue(decode_run(), unproven, IssueRequest(repro_cmd="x")).verification_ok
    unknown = issue(decode_run(), {}, IssueRequest(repro_cmd="x"))
    assert not unknown.verification_ok
    assert any("not in this ledger" in note for note in unknown.notes)


def test_the_name_of_a_part_of_a_model_differs_from_the_whole_models() -> None:
    part = certificate(decode_run(layers=4))
    assert part.model == "llama-1b[4/16 layers]" and (part.layers.run, part.layers.of) == (4, 16)
    assert certificate(decode_run(layers=16)).model == "llama-1b"
    for lie in ({"model": "llama-1b"}, {"layers": {"run": 16, "of": 16}}, {"layers": {"run": 4, "of": 4}}):
        told = wrong(decode(resealed({**document(part), **lie})))
        assert told.startswith("model")
    claim = resealed({**document(SMALL), "layers": {"run": 17, "of": 16}})
    assert wrong(decode(claim)).startswith("layers")


@pytest.mark.parametrize("layers", [0, 4])
def test_a_folders_name_may_hold_brackets(layers: int) -> None:
    model = dataclasses.replace(models.load("llama-1b"), name="my[4/16] model [v2]")
    made = certificate(decode_run(model=model, layers=layers))
    assert made.model.startswith("my[4/16] model [v2]") and wrong(made) == ""
    lie = {"model": "my[4/16] model [v2]" if layers else "my[4/16] model [v2][4/16 layers]"}
    assert wrong(decode(resealed({**document(made), **lie}))).startswith("model")


def test_arithmetic_of_all_cores_is_the_ceiling_of_the_right_dtype() -> None:
    assert peak_flops(fingerprint(), "fp32") == 2e11
    assert peak_flops(dataclasses.replace(fingerprint(), rates={}), "bf16") == 0.0


# --- physics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("over", "possible"), [(1.09, True), (1.11, False)])
def test_a_step_faster_than_the_memory_is_refused_and_one_within_the_probes_error_is_not(
    over: float, possible: bool
) -> None:
    run = decode_run(noise=0.0)
    cache = 32 << 20
    floor_ms = (run.bytes_per_step - cache) / CEILING * 1e3
    fast = dataclasses.replace(run, optimised_ns=(int(floor_ms / over * 1e6),) * run.plan.iters)
    if possible:
        assert wrong(certificate(fast)) == ""
        return
    with pytest.raises(ImpossibleRun, match="faster than the memory"):
        certificate(fast)


def test_a_baseline_faster_than_the_memory_is_refused_too() -> None:
    with pytest.raises(ImpossibleRun, match="baseline"):
        certificate(decode_run(noise=0.0, speedup=0.5))


def test_without_a_read_probe_nothing_is_certified() -> None:
    with pytest.raises(ImpossibleRun, match="no read rate"):
        certificate(decode_run(read_probes=(), read_bytes_per_s=0.0))


def test_data_in_the_cache_may_be_read_faster_than_memory() -> None:
    asked = {"bytes_per_step": 1000, "step_ms": 1e-6, "read_bytes_per_s": 1.0}
    assert weigh(**asked, cache_bytes=1000).possible and not weigh(**asked, cache_bytes=0).possible


def test_an_impossible_figure_is_found_in_a_certificate_whose_seal_was_computed_again() -> None:
    """Divide every step by ten and recompute all sums: the memory's rate reveals it."""
    fast = dataclasses.replace(SMALL.samples, optimised_ns=(6_000_000,) * 3)
    assert "impossible" in wrong(rewritten(SMALL, samples=fast))


# --- the prompt ----------------------------------------------------------------------------------------------------


def prompted(tokens: str = "a", file: str = "b", **changes: Any) -> Certificate:
    digest = PromptDigest(tokens_sha256=tokens * 64, file_sha256=file * 64)
    return certificate(decode_run(prompt_digest=digest, **{"prompt": "p/text.txt", "iters": 20, **changes}))


@pytest.mark.parametrize(
    ("prompt", "stated", "why"),
    [
        ("random", None, "no sha256 of the tokens"),
        ("random", {"tokens_sha256": "ab", "file_sha256": ""}, "no sha256 of the tokens"),
        ("random", {"tokens_sha256": "a" * 64, "file_sha256": "b" * 64}, "no file is named"),
        ("text.txt", {"tokens_sha256": "a" * 64, "file_sha256": ""}, "no sha256 of the file 'text.txt'"),
        ("text.txt", {"tokens_sha256": "a" * 64, "file_sha256": "B" * 64}, "no sha256 of the file 'text.txt'"),
        ("synthetic", {"tokens_sha256": "a" * 64, "file_sha256": ""}, "but no prompt ran"),
    ],
)
def test_a_certificate_names_the_prompt_that_was_run(prompt: str, stated: dict[str, str] | None, why: str) -> None:
    made = certificate(decode_run(prompt=prompt))
    assert wrong(made) == "" and (made.prompt is None) == (prompt == "synthetic")
    told = wrong(decode(resealed({**document(made), "prompt": stated})))
    assert told.startswith("prompt: ") and why in told


@pytest.mark.parametrize("version", [3, 4])
def test_an_earlier_certificate_without_its_prompt_is_read(version: int, tmp_path: Path) -> None:
    earlier = {name: value for name, value in document().items() if name != "prompt"} | {"version": version}
    (tmp_path / "old.jsonl").write_bytes(resealed(earlier) + b"\n")
    found = verify(tmp_path / "old.jsonl").last
    assert found.prompt is None and found.version == version
    assert "prompt: " in wrong(decode(resealed({**document(), "version": version})))
    [change] = compare.compare(compare.of_certificates([SMALL]), compare.read(tmp_path / "old.jsonl"))
    assert change.note == ""
    with pytest.raises(ValueError, match="field prompt is missing"):
        decode(resealed(earlier | {"version": c.VERSION}))


def test_a_prompt_that_is_not_the_certified_one_is_refused() -> None:
    first = prompted()
    for same in (prompted(), prompted(file="c")):  # the tokens are equal, so another file needs no message
        assert rerun.compare(first, same).notes == ()
    with pytest.raises(UsageError, match=r"p/text\.txt is not the prompt") as refused:
        rerun.compare(first, prompted(tokens="d", file="c"))
    assert "dddddddddddd; certified aaaaaaaaaaaa" in refused.value.why and "tokenizer" not in refused.value.why
    with pytest.raises(UsageError, match="is not the prompt") as refused:
        rerun.refuse_other_prompt(first, prompted(tokens="d").prompt)
    assert "the tokenizer differs" in refused.value.why


def test_a_rerun_with_a_possibly_different_prompt_is_marked() -> None:
    drawn = certificate(decode_run(iters=20))
    other = dataclasses.replace(drawn, prompt=c.Prompt(tokens_sha256="d" * 64, file_sha256=""))
    assert rerun.compare(drawn, drawn).notes == ()
    [note] = rerun.compare(drawn, other).notes
    assert "draws other tokens" in note
    silent = dataclasses.replace(prompted(), version=4, prompt=None)
    [note] = rerun.compare(silent, prompted()).notes
    assert "has no digest" in note
    assert rerun.compare(dataclasses.replace(drawn, version=4, prompt=None), drawn).notes == ()


def test_figures_on_another_prompt_are_compared_with_a_note() -> None:
    [one, other] = compare.of_certificates([prompted(), prompted(tokens="d")])
    notes = [change.note for change in compare.compare([one, other], [one])]
    assert notes == ["", "then on another prompt"]
    elsewhere = dataclasses.replace(one, device="Other CPU")
    assert compare.compare([other], [elsewhere])[0].note == "then on Other CPU, on another prompt"


# --- bytes --------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_no_byte_can_be_changed_unnoticed(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(LINE) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != LINE[at]))
    kind = data.draw(st.sampled_from(("replace", "insert", "remove")))
    middle = {"replace": bytes([byte]), "insert": bytes([byte, LINE[at]]), "remove": b""}[kind]
    with pytest.raises(ValueError) as refused:
        decode(LINE[:at] + middle + LINE[at + 1 :])
    assert not isinstance(refused.value, RecursionError)


def other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, value[0]] if value else [1]
    if isinstance(value, dict):
        return {**value, next(iter(value), "new"): other(next(iter(value.values()), 1))}
    return 1


@pytest.mark.parametrize("field", [f for f in c.REQUIRED if f not in ("checksum", "field_digests", "signature")])
def test_a_changed_field_is_named(field: str) -> None:
    changed = {**document(), field: other(document()[field])}
    with pytest.raises(ValueError, match=field if field not in ("format", "version") else "certificate|version"):
        decode(canonical_json(changed))
    gone = {k: v for k, v in document().items() if k != field}
    with pytest.raises(ValueError, match=field if field not in ("format", "version") else "certificate|version"):
        decode(canonical_json(gone))


@pytest.mark.parametrize(
    "field",
    ["iters", "latency_ms", "latency_interval_ms", "baseline_ms", "speedup", "speedup_interval", "tokens_per_sec",
     "sustained_tokens_per_sec", "itl_ms", "bytes_per_token", "read_median_bytes_per_s", "roofline", "decision_ids",
     "verification_ok", "peak_tokens_per_sec", "baseline_p95_ms"],
)  # fmt: skip
def test_a_figure_that_does_not_follow_is_named_though_the_seal_was_computed_again(field: str) -> None:
    changed = resealed({**document(), field: other(document()[field])})
    assert field in wrong(decode(changed)) or (field == "iters" and "samples" in wrong(decode(changed)))


@pytest.mark.parametrize(
    ("served", "why"),
    [
        ({}, "no call of it was counted"),
        ({"cpp:attn": 16 * 3 - 1}, "47 calls counted, 48 made by 3 steps"),
        ({"cpp:attn": 16 * 3 + 1}, "49 calls counted"),
        ({"torch:sdpa": 16 * 3}, "'cpp:attn' is named, but served no call"),
        ({"cpp:attn": 16 * 3, "torch:sdpa": 0}, "fewer than one call"),
        ({"cpp:attn": 16, "torch:sdpa": 32}, ""),  # demoted within the run: both ran
    ],
)
def test_uncounted_calls_are_not_proof_of_use(served: dict[str, int], why: str) -> None:
    stated = document()
    stated["per_op"]["attn"]["served"] = served
    found = wrong(decode(resealed(stated)))
    assert why in found and bool(found) == bool(why)


def test_an_advancing_stream_may_have_fewer_calls_in_its_last_bucket() -> None:
    stated = document(certificate(decode_run(iters=3, advance=True)))
    stated["per_op"]["attn"]["served"] = {"cpp:attn": 16}
    assert wrong(decode(resealed(stated))) == ""
    stated = document()
    stated["per_op"]["attn"]["served"], stated["mode"] = {"cpp:attn": 16}, "team.t2.highest"
    assert wrong(decode(resealed(stated))) == "", "calls in the last bucket are not counted separately"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "line"),
        (b"[]", "not a certificate"),
        (b'{"format":"autosel.certificate","version":2}', "version 2"),
        (LINE.replace(b'"warmup":10', b'"warmup":NaN'), "NaN is not JSON"),
        (LINE.replace(b'"warmup":10', b'"warmup":1e999'), "1e999 is not JSON"),
        (LINE.replace(b'"warmup":10', b'"warmup":10,"warmup":10'), "twice"),
        (LINE.replace(b'"warmup":10', b'"warmup":' + b"[" * 500 + b"]" * 500), "nested too deeply"),
        (LINE.replace(b'"warmup":10', b'"warmup":' + b"[" * 200_000 + b"]" * 200_000), "line"),
        (LINE.replace(b'"warmup":10', b'"warmup":' + b"9" * 6000), "digits"),
        (LINE.replace(b'"warmup":10', b'"warmup":9007199254740993'), "RFC 8785"),
        (LINE.replace(b'"warmup":10', b'"warmup": 10'), "spelling"),
        (LINE.replace(b'"warmup":10', b'"warmup":1e1'), "expected int"),
        (LINE.replace(b'"dtype":"bf16"', b'"dtype":"\\ud800"'), "surrogate"),
        (LINE.replace(b'"dtype":"bf16"', b'"dtype":"\xff"'), "not UTF-8"),
        (LINE + b" ", "spelling"),
        (resealed({**document(), "extra": 1}), "unknown"),
        (resealed({**document(), "warmup": "10"}), "warmup"),
        (resealed({**document(), "warmup": True}), "warmup"),
        (resealed({k: v for k, v in document().items() if k != "warmup"}), "warmup is missing"),
        (b'{"a":"' + b"x" * c.MOST_BYTES + b'"}', "longer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_certificate_is_refused_with_the_reason(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(line)


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
), st.sampled_from(c.FIELDS))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_value_in_a_field_breaks_the_reader(value: Any, field: str) -> None:
    """Recompute the seal, so that schema and arithmetic see the value: the result is a certificate or a ValueError."""
    try:
        line = resealed({**document(), field: value})
    except (ValueError, TypeError):  # not an RFC 8785 document
        return
    try:
        made = decode(line)
    except ValueError:
        return
    assert isinstance(wrong(made), str)


# --- file and chain -----------------------------------------------------------------------------------------------


def test_a_file_holds_a_chain_and_its_head_can_be_kept_elsewhere(file: Path) -> None:
    found = verify(file)
    assert (found.certificates, found.signed, found.last.sequence) == (3, 0, 3)
    assert verify(file, head=found.head).head == found.head
    assert verify(file, keep=2).last.sequence == 2
    with pytest.raises(BadCertificate, match="no line 4"):
        verify(file, keep=4)


def test_a_cut_tail_shows_only_against_a_head_kept_elsewhere(file: Path) -> None:
    head = verify(file).head
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    assert verify(file).certificates == 2
    with pytest.raises(BadCertificate, match="does not end with"):
        verify(file, head=head)


@pytest.mark.parametrize(
    ("edit", "where", "why"),
    [
        (lambda rows: rows[1:], ":1", "sequence: it is 2"),
        (lambda rows: [rows[0], rows[2]], ":2", "sequence: it is 3"),
        (lambda rows: [rows[1], rows[0], rows[2]], ":1", "sequence"),
        (lambda rows: [rows[0], rows[0], rows[2]], ":2", "sequence"),
        (lambda rows: [rows[0].replace(b'"warmup":10', b'"warmup":11'), *rows[1:]], ":1", "warmup was changed"),
        (lambda rows: [rows[0], b"\n", *rows[1:]], ":2", "Expecting value"),
        (lambda rows: [rows[0], rows[1][:-1] + b"\r\n", rows[2]], ":2", "spelling"),
        (lambda rows: [*rows, b"{}\n"], ":4", "not a certificate"),
        (lambda rows: [*rows, rows[2][:100]], ":4", "newline is missing"),
        (lambda rows: [*rows, b"x" * (c.MOST_BYTES + 10) + b"\n"], ":4", "longer"),
        (lambda rows: [*rows[:2], rows[2][:-1]], ":3", "newline is missing"),
    ],
)
def test_a_touched_file_is_refused_with_its_line(edit: Any, where: str, why: str, file: Path) -> None:
    file.write_bytes(b"".join(edit(file.read_bytes().splitlines(keepends=True))))
    with pytest.raises(BadCertificate) as refused:
        verify(file)
    assert f"{file}{where}" in refused.value.what and why in refused.value.why


def test_a_line_replaced_by_another_true_certificate_breaks_the_chain_behind_it(file: Path) -> None:
    rows = file.read_bytes().splitlines(keepends=True)
    first = decode(rows[0][:-1])
    other_run = chained(certificate(decode_run(iters=3, seed=9)), 1, first.previous)
    file.write_bytes(encode(other_run) + b"\n" + rows[1] + rows[2])
    with pytest.raises(BadCertificate, match="checksum of the line before") as refused:
        verify(file)
    assert f"{file}:2" in refused.value.what


def test_no_line_is_appended_after_a_partial_or_foreign_line(tmp_path: Path) -> None:
    for content in (LINE[:50], b"{}\n", LINE + b"\n" + LINE + b"\n", b"\n"):
        path = tmp_path / "f.jsonl"
        path.write_bytes(content)
        with pytest.raises(BadCertificate):
            append(path, SMALL)
        assert path.read_bytes() == content


def test_writers_at_once_lose_nothing_and_the_chain_holds(tmp_path: Path) -> None:
    path, made = tmp_path / "f.jsonl", certificate(decode_run(iters=3))

    def write() -> None:
        for _ in range(8):
            append(path, made)

    writers = [forked(write) for _ in range(3)]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert verify(path).certificates == 24


def test_a_disk_that_fills_up_leaves_the_file_as_it_was(file: Path) -> None:
    before, made = file.read_bytes(), certificate(decode_run(iters=3))

    def write() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, resource.RLIM_INFINITY))
        with pytest.raises(AutoselError) as refused:
            append(file, made)
        return refused.value.what

    assert "cannot write" in result_of(write)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_a_path_that_is_not_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "absent"):
        with pytest.raises(UsageError):
            list(lines(tmp_path / name))
    (tmp_path / "empty").touch()
    with pytest.raises(BadCertificate, match="holds no certificate"):
        verify(tmp_path / "empty")


def test_a_link_is_followed_and_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    append(link, SMALL)
    assert link.is_symlink() and verify(file).certificates == 4


# --- signatures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Any:
    pytest.importorskip("cryptography", reason="signatures need the extra `sign`")
    return sign.make_key(tmp_path / "keys" / "own.pem")


def test_a_signature_holds_and_cannot_be_taken_off_moved_or_replaced(key: Any, tmp_path: Path) -> None:
    made = sign.sign(SMALL, key)
    assert sign.trouble(made) == "" and decode(encode(made)) == made
    assert "has no signature" in sign.trouble(dataclasses.replace(made, signature=None))
    another = sign.sign(certificate(decode_run(iters=3, seed=5)), key)
    assert "does not match" in sign.trouble(dataclasses.replace(made, signature=another.signature))
    stranger = sign.make_key(tmp_path / "keys" / "stranger.pem")
    forged = sign.sign(SMALL, stranger)
    mixed = seal(dataclasses.replace(forged, signer=made.signer))
    assert "does not match" in sign.trouble(dataclasses.replace(mixed, signature=forged.signature))
    assert "names no signer" in sign.trouble(dataclasses.replace(SMALL, signature=made.signature))
    for value in ("", "00" * 63, "zz" * 64, "00" * 64):
        broken = c.Signature(algorithm="Ed25519", value=value)
        assert sign.trouble(dataclasses.replace(made, signature=broken))


def test_a_file_is_verified_with_the_given_key(key: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    append(path, SMALL, key)
    assert verify(path, signer=sign.public_hex(key)).signed == 1
    with pytest.raises(BadCertificate, match="signed by"):
        verify(path, signer="ab" * 32)
    append(path, SMALL)
    assert verify(path).signed == 1
    with pytest.raises(BadCertificate, match="not signed") as refused:
        verify(path, signer=sign.public_hex(key))
    assert ":2" in refused.value.what


def test_a_key_is_complete_or_absent_and_is_never_replaced(
    key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fill the disk, or kill the process, at each write: neither a partial key nor a temporary file remains."""
    own = tmp_path / "keys" / "own.pem"
    kept = own.read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot make") as refused:
            sign.make_key(own)
    assert "exists" in refused.value.why and own.read_bytes() == kept
    dangling = tmp_path / "keys" / "dangling.pem"
    dangling.symlink_to(tmp_path / "elsewhere.pem")
    with pytest.raises(UsageError, match="cannot make"):
        sign.make_key(dangling)

    def full(descriptor: int) -> None:
        assert not late.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    late = tmp_path / "keys" / "late.pem"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="cannot make"):
            sign.make_key(late)
    assert {p.name for p in own.parent.iterdir()} == {"own.pem", "dangling.pem"}
    assert not (tmp_path / "elsewhere.pem").exists()


def test_one_of_several_processes_creates_the_key(key: Any, tmp_path: Path) -> None:
    path, count = tmp_path / "keys" / "shared.pem", 8
    together = threading.Barrier(count)

    def make() -> str:
        together.wait()
        try:
            return sign.public_hex(sign.make_key(path))
        except UsageError:
            return ""

    with ThreadPoolExecutor(count) as pool:
        made = [found for found in pool.map(lambda _: make(), range(count)) if found]
    assert made == [sign.public_key(str(path))] and path.stat().st_mode & 0o777 == 0o600


def test_key_files_are_read_in_each_form_and_refused_with_the_reason(key: Any, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import rsa

    own = tmp_path / "keys" / "own.pem"
    assert sign.public_hex(sign.private_key(own)) == sign.public_hex(key) == sign.public_key(str(own))
    assert own.stat().st_mode & 0o777 == 0o600
    public = tmp_path / "public.pem"
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    assert sign.public_key(str(public)) == sign.public_hex(key) == sign.public_key(sign.public_hex(key))

    def written(name: str, made: Any, form: Any, secret: Any = None) -> Path:
        path = tmp_path / name
        path.touch(0o600)
        path.write_bytes(made.private_bytes(s.Encoding.PEM, form, secret or s.NoEncryption()))
        return path

    ssh = written("ssh", key, s.PrivateFormat.OpenSSH)
    assert sign.public_hex(sign.private_key(ssh)) == sign.public_hex(key)
    with pytest.raises(UsageError, match="encrypted"):
        sign.private_key(written("locked", key, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x")))
    with pytest.raises(UsageError, match="not an Ed25519 key"):
        sign.private_key(written("rsa", rsa.generate_private_key(65537, 2048), s.PrivateFormat.PKCS8))
    own.chmod(0o640)
    with pytest.raises(UsageError, match="open to others"):
        sign.private_key(own)
    for name in ("absent", "."):
        with pytest.raises(UsageError):
            sign.private_key(tmp_path / name)
    written("junk", key, s.PrivateFormat.PKCS8).write_text("junk")
    with pytest.raises(UsageError, match="no private key"):
        sign.private_key(tmp_path / "junk")


# --- objectives ---------------------------------------------------------------------------------------------------


def test_objectives_are_met_or_missed_with_exit_code_3() -> None:
    made = certificate(decode_run(), objectives=slo.parse("ttft<500ms, p99_itl<=0.1s,tps>=10"))
    assert [j.objective for j in made.slo] == ["ttft<500ms", "p99_itl<=0.1s", "tps>=10"]
    assert [j.met for j in made.slo] == [False, True, True]
    assert wrong(made) == ""
    with pytest.raises(MissedObjective, match="1 of 3 objectives missed") as missed:
        slo.refuse_missed(made.slo)
    assert missed.value.exit_code == 3 and "measured 900" in missed.value.why
    lie = [{**j, "met": True} for j in document(made)["slo"]]
    assert wrong(decode(resealed({**document(made), "slo": lie}))).startswith("slo")


@given(st.sampled_from(sorted(slo.METRICS)), st.sampled_from(("", "=")), st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_an_objective_survives_a_round_trip_through_its_text(
    metric: str, equal: str, limit: float, measured: float
) -> None:
    [one] = slo.parse(f"{metric}{slo.METRICS[metric]}{equal}{limit:.3f}{'' if metric == 'tps' else 'ms'}")
    [again] = slo.parse(one.text)
    assert slo.judge([one], {metric: measured})[0] == slo.judge([again], {metric: measured})[0]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("ttft", UsageError, "is not an objective"),
        ("ttft<500", UsageError, "a time is expected"),
        ("tps>5ms", UsageError, "a rate is expected"),
        ("ttft>500ms", UsageError, "lower is better"),
        ("tps<5", UsageError, "higher is better"),
        ("tttf<5ms", UnknownName, "did you mean ttft"),
        ("ttft<nanms", UsageError, "is not an objective"),
        ("ttft<5ms,,", UsageError, "is not an objective"),
        ("ttft<5ms;itl<5ms", UsageError, "is not an objective"),
    ],
)
def test_an_invalid_objective_is_reported(text: str, error: type[AutoselError], said: str) -> None:
    with pytest.raises(error, match=said):
        slo.parse(text)


def test_an_objective_that_the_run_has_no_figure_of_is_refused() -> None:
    with pytest.raises(UsageError, match="no ttft"):
        certificate(decode_run(ttft_ns=None), objectives=slo.parse("ttft<1s"))


# --- audit and trace ----------------------------------------------------------------------------------------------


def test_the_audit_accounts_for_the_whole_step_and_names_each_ops_limit() -> None:
    found = audit.audit(certificate(decode_run(noise=0.0)))
    assert sum(r.share for r in found.rows) + found.rest_share == pytest.approx(1)
    assert [r.label for r in found.rows][:2] == ["gate_up", "linear down+res"]
    limits = {r.label: r.limit for r in found.rows}
    assert limits["gate_up"] == "memory" and limits["rope"] == "overhead"
    top = found.rows[0]
    assert (top.runner_up, top.runner_up_ratio, top.backend) == ("torch:packed", 1.9, "CPP")
    assert top.roofline == pytest.approx(top.bytes / READ / top.time_us * 1e6)
    assert json.dumps(audit.document(found))


def test_an_op_is_limited_by_arithmetic_where_that_takes_longer_and_by_a_cache_where_memory_could_not() -> None:
    run = decode_run(noise=0.0)
    ops = {o.label: o for o in run.per_op}
    busy = dataclasses.replace(ops["attn"], flops=int(ops["attn"].median_us * 1e-6 * 1.9e11), bytes_moved=1)
    cached = dataclasses.replace(ops["gate_up"], median_us=ops["gate_up"].median_us / 2)
    kept = [o for o in run.per_op if o.label not in ("attn", "gate_up")]
    found = audit.audit(certificate(dataclasses.replace(run, per_op=(busy, cached, *kept))))
    limits = {r.label: r.limit for r in found.rows}
    assert (limits["attn"], limits["gate_up"]) == ("compute", "cache")


PHASES = {"M": {"name", "ph", "pid", "tid", "args"}, "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}}
TEAM = tuple(
    Span(lane=f"thread {rank}", begin_ns=at, end_ns=at + took, label=op, site=op, also="", candidate="cpp:step")
    for op, at, took in (("qkv", 0, 900), ("attn", 1000, 450), ("o", 1500, 400))
    for rank in (1, 0)
)


def test_the_trace_is_a_timeline_of_each_thread_in_the_format_that_viewers_read() -> None:
    """Check the Trace Event Format: an object with traceEvents; complete events with ts and dur in microseconds."""
    made = certificate(decode_run(iters=20))
    found = json.loads(json.dumps(trace.trace(made, TEAM), allow_nan=False))
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in found["traceEvents"]:
        assert set(event) == PHASES[event["ph"]]
        assert all(isinstance(event[n], int) for n in ("pid", "tid"))
    spans = [e for e in found["traceEvents"] if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert list(threads.values()) == ["optimised steps", "baseline steps", "thread 1", "thread 0"]
    assert {(e["pid"], e["tid"]) for e in spans} == set(threads)
    for thread in threads:
        own = [e for e in spans if (e["pid"], e["tid"]) == thread]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own)), "out of order, or overlapping"
    steps = [e for e in spans if e["cat"] == "step"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(steps)), "both arms ran in turn"
    assert all((a["tid"] == 1) == (coin == "1") for a, coin in zip(steps[::2], made.samples.first, strict=True))
    assert [e["name"] for e in spans if e["cat"] == "op"] == ["qkv", "attn", "o"] * 2
    assert {e["pid"] for e in trace.trace(made)["traceEvents"]} == {trace.STEPS}, "a step of unknown parts has no lane"


def test_the_trace_of_a_run_without_a_baseline_has_the_optimised_steps_only() -> None:
    events = trace.trace(certificate(ALONE))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["optimised steps"]
    steps = [e for e in events if e["ph"] == "X"]
    assert [round(1000 * e["dur"]) for e in steps] == list(ALONE.optimised_ns)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(steps))


# --- again, and against an earlier one -----------------------------------------------------------------------------


def test_a_figure_is_reproduced_also_if_the_whole_machine_is_slower() -> None:
    first = certificate(decode_run(seed=1, iters=60))
    again = certificate(decode_run(seed=2, iters=60))
    assert rerun.compare(first, again).outcome == "reproduced"
    half = decode_run(seed=3, iters=60, step_ms=130, read_probes=(READ / 2,) * 60, read_bytes_per_s=READ)
    assert rerun.compare(first, certificate(half)).outcome == "reproduced"


@pytest.mark.parametrize(
    ("change", "outcome", "exit_code"),
    [
        ({"step_ms": 85, "speedup": 2.7 * 65 / 85}, "slower", 3),
        ({"speedup": 2.3}, "slower", 3),
        ({"speedup": 3.2}, "faster", 0),
        ({"noise": 1.0, "step_ms": 650}, "too noisy", 5),
    ],
)
def test_a_figure_that_is_not_reproduced_is_reported(change: dict[str, float], outcome: str, exit_code: int) -> None:
    first = certificate(decode_run(seed=1, iters=60))
    found = rerun.compare(first, certificate(decode_run(seed=2, iters=60, **change)))
    assert found.outcome == outcome
    if exit_code:
        with pytest.raises((rerun.NotReproduced, TooNoisy)) as raised:
            rerun.judge(found)
        assert raised.value.exit_code == exit_code
    else:
        rerun.judge(found)


def test_a_rerun_that_reads_more_bytes_in_as_much_more_time_is_slower() -> None:
    """Rerun with unpacked weights what was certified with packed ones, at the same share of the read rate."""
    first = decode_run(iters=60)
    packed = dataclasses.replace(
        first,
        bytes_per_step=first.bytes_per_step * 3 // 4,
        saved_bytes=first.bytes_per_step // 4,
        optimised_ns=tuple(ns * 3 // 4 for ns in first.optimised_ns),
    )
    found = rerun.compare(certificate(packed), certificate(first))
    assert found.outcome == "slower" and any("weights were read packed" in note for note in found.notes)
    assert rerun.compare(certificate(first), certificate(packed)).outcome == "faster"


def test_the_baseline_is_judged_by_all_bytes_that_it_reads() -> None:
    """Count the bytes that the optimised step saves for the baseline, which cannot read packed weights."""
    first = decode_run(iters=20)
    moved = first.bytes_per_step
    packed = dataclasses.replace(first, bytes_per_step=moved * 3 // 4, saved_bytes=moved // 4)
    weighed = physics(certificate(packed))
    plain = physics(certificate(first))
    needed = [found["the baseline's step"].needed_bytes_per_s for found in (weighed, plain)]
    assert needed[0] == pytest.approx(needed[1])
    lie = document(certificate(packed))
    for saved in (-1, moved, "all of it"):
        told = wrong(decode(resealed({**lie, "options": {**lie["options"], "saved_bytes": saved}})))
        assert told.startswith("options: saved_bytes")


def test_two_runs_of_different_things_or_devices_are_not_compared() -> None:
    first = certificate(decode_run(iters=20))
    for change in ({"seq": 1024}, {"layers": 4}, {"batch": 2}, {"iters": 21}):
        with pytest.raises(UsageError, match="another run"):
            rerun.compare(first, certificate(decode_run(**{"iters": 20, **change})))
    with pytest.raises(UsageError, match="another device"):
        rerun.refuse_other_device(first, "ab" * 32, "Other CPU")
    rerun.refuse_other_device(first, first.hw_id, first.device)


def test_speedups_against_an_earlier_report_compare_like_with_like(tmp_path: Path) -> None:
    old, new = certificate(decode_run(seed=1)), certificate(decode_run(seed=2, step_ms=60))
    append(tmp_path / "old.jsonl", old)
    [change] = compare.compare(compare.of_certificates([new]), compare.read(tmp_path / "old.jsonl"))
    assert change.speedup == pytest.approx(new.tokens_per_sec / old.tokens_per_sec) and change.note == ""
    for unlike in (decode_run(layers=4), decode_run(batch=2), decode_run(seq=1024), decode_run(advance=True)):
        with pytest.raises(BadConfig, match="nothing to compare"):
            compare.compare(compare.of_certificates([certificate(unlike)]), compare.of_certificates([old]))
    moved = certificate(dataclasses.replace(decode_run(), fingerprint=dataclasses.replace(fingerprint(), name="Other")))
    assert "Other" in compare.compare(compare.of_certificates([new]), compare.of_certificates([moved]))[0].note


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"step_ms": 60}, 0, "B is faster: B over A is 1.0"),
        ({"step_ms": 70}, 3, "B is slower: B over A is 0.9"),
        ({"seed": 1}, 0, "no difference is shown: B over A is 1x"),
        ({"step_ms": 60, "mode_key": "eager.t4.highest"}, 5, "no claim: B over A is 1.0"),
        ({"step_ms": 60, "read_probes": (20e9,) * 50}, 5, "but these conditions differ: read rate"),
        ({"step_ms": 60, "iters": 5}, 5, "fewer than eight steps or trials"),
    ],
)
def test_verify_compares_two_runs_and_claims_nothing_if_a_condition_differs(
    change: dict[str, Any], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "a.jsonl", certificate(decode_run(seed=1)))
    for run in (decode_run(seed=9, step_ms=90), decode_run(**{"seed": 2} | change)):
        append(tmp_path / "b.jsonl", certificate(run))
    words = ["verify", "--compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl:2")]
    assert main.run(words) == code
    out, err = capsys.readouterr()
    assert told in " ".join(out.split()) and "read rate" in out
    assert max(map(len, out.splitlines()[2:])) <= 80
    assert err.startswith({0: "", 3: "error: B is slower", 5: "undecided: 1 of 1 runs"}[code])
    assert main.run([*words, "--json"]) == code
    [found] = json.loads(capsys.readouterr().out)["compare"]
    assert (found["outcome"] == "no claim") == (code == 5)


def test_the_json_of_run_can_be_compared_with(tmp_path: Path) -> None:
    said = {"certificate": document(), "file": "c.jsonl", "audit": {}, "compare": [], "error": None}
    (tmp_path / "r.json").write_text(json.dumps(said, indent=2))
    assert compare.read(tmp_path / "r.json") == compare.of_certificates([SMALL])


NO_REPORTS = [
    b"", b"[]", b"{}", b'{"format":"autosel.suite"}', b"\xff", b'{"a":NaN}', b'{"format":"autosel.report"}',
    b'{"format":"autosel.report","certificates":5}', b'{"format":"autosel.report","certificates":null}',
    b'{"format":"autosel.report","certificates":[]}', b'{"format":"autosel.report","certificates":[5]}',
]  # fmt: skip


@pytest.mark.parametrize("content", NO_REPORTS)
def test_an_invalid_report_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(BadConfig):
        compare.read(path)
    with pytest.raises(BadConfig, match="cannot read"):
        compare.read(tmp_path / "absent.json")
    with pytest.raises(BadConfig, match="cannot read"):
        compare.read(tmp_path / ("n" * 300))


def test_the_ratio_of_two_runs_has_an_interval_from_eight_steps_on() -> None:
    rng = Random(1)
    old, new = ([x * (1 + 0.05 * rng.gauss()) for _ in range(40)] for x in (10.0, 20.0))
    found = ratio_interval(new, old)
    assert found is not None and found.lo < 2 < found.hi
    assert ratio_interval(new[:7], old) is None and ratio_interval(new, old[:7]) is None
    made = [certificate(decode_run(seed=i, step_ms=60.0, iters=24)) for i in range(2)]
    now, before = (compare.of_certificates([one]) for one in made)
    (change,) = compare.compare(now, before)
    assert change.interval is not None and change.interval.lo <= change.speedup <= change.interval.hi


def test_fewer_than_eight_pairs_of_steps_claim_no_interval() -> None:
    assert claimed_interval(certificate(decode_run(iters=7))) is None
    enough = certificate(decode_run(iters=8))
    assert claimed_interval(enough) == enough.speedup_interval


# --- suites and the memory table ----------------------------------------------------------------------------------


def test_a_suite_is_the_median_of_eight_trials_after_a_warm_up() -> None:
    base = Plan(model=models.load("llama-1b"))
    for config in suite.CONFIGURATIONS:
        plan = suite.plan_of(base, config)
        assert (plan.seq - 1, plan.iters + 1, plan.advance) == (config.prompt, config.tokens, True)
    medium = suite.CONFIGURATIONS[1]
    runs = suite.runs(medium, suite.plan_of(base, medium), suite.LEVELS["standard"])
    assert [(r.plan.iters, r.counts) for r in runs] == [(8, False)] + [(255, True)] * 8
    assert runs[0].title == "llama-1b medium 256/256, warm-up" and len({r.title for r in runs}) == 9
    made = [
        certificate(decode_run(seed=i, step_ms=60.0 + i, iters=r.plan.iters, seq=r.plan.seq, advance=True))
        for i, r in enumerate(runs)
        if r.counts
    ]
    row = suite.row(medium, made)
    middle = [one.sustained_tokens_per_sec for one in made[3:5]]
    assert row.decode_tokens_per_s == pytest.approx(sum(middle) / 2)
    assert min(row.e2e_trials) < row.e2e_tokens_per_s < max(row.e2e_trials) and len(row.e2e_trials) == 8
    assert row.speedup_interval is not None and row.speedup_interval.lo <= row.speedup <= row.speedup_interval.hi
    assert suite.row(medium, made[:7]).speedup_interval is None, "fewer than eight blocks give no interval"


def test_the_quick_suite_takes_a_sixteenth_of_the_steps_and_its_rows_are_not_compared_with_whole_answers() -> None:
    whole, short = suite.configurations("standard"), suite.configurations("quick")
    assert [c.tokens for c in short] == [16, 16, 16, 64, 64, 16, 16]
    for a, b in zip(whole, short, strict=True):
        assert (a.prompt, a.sampling, a.paged) == (b.prompt, b.sampling, b.paged)
    assert (suite.layers("quick", None, 16), suite.layers("quick", 2, 16), suite.layers("quick", 16, 16)) == (4, 2, 0)
    assert (suite.layers("quick", None, 3), suite.layers("full", None, 16), suite.layers("full", 20, 16)) == (0, 0, 0)
    plan = suite.plan_of(Plan(model=models.load("llama-1b")), short[0])
    runs = suite.runs(short[0], plan, suite.LEVELS["quick"])
    assert [(r.title, r.plan.iters) for r in runs[:2]] == [
        ("llama-1b short 64/16, warm-up", 8), ("llama-1b short 64/16, trial 1 of 8", 15),
    ]  # fmt: skip


def test_the_memory_table_ends_at_the_models_limit_and_a_batch_never_grows_with_the_context() -> None:
    plan = Plan(model=models.load("llama-1b"))

    def need(one: Plan) -> int:
        return one.model.weight_bytes(one.dtype) + one.batch * one.seq * one.model.kv_bytes_per_token(one.dtype)

    def table(peak: float) -> capacity.Capacity:
        rates: dict[str, Any] = {"memory_bytes": 8 << 30, "read_bytes_per_s": READ, "peak_flops": peak}
        return capacity.capacity(plan, need, lambda p: p.batch * 10**9, name="llama-1b", device="x", **rates)

    found = table(1e15)
    assert found.fits[0].context == 128 and found.fits[-1].context == plan.model.max_context
    batches = [f.batch for f in found.fits]
    assert batches == sorted(batches, reverse=True) and batches[0] > 1
    assert all(need(dataclasses.replace(plan, seq=f.context, batch=f.batch)) <= 8 << 30 for f in found.fits if f.batch)
    one = found.fits[0]
    step = plan.model.weight_bytes_per_step("bf16") + one.batch * plan.model.kv_bytes_read(128, "bf16")
    assert one.ceiling_tokens_per_s == pytest.approx(one.batch * READ / step)
    assert table(0.0) == found  # a rate that was not measured limits nothing
    slow = [f.ceiling_tokens_per_s for f in table(1e11).fits]
    assert slow[0] == pytest.approx(100) and slow[-1] == found.fits[-1].ceiling_tokens_per_s


# --- the page -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="reports need the extra `plots`")
    from autosel.certify import report

    folder = tmp_path_factory.mktemp("report")
    hostile = dataclasses.replace(fingerprint(), name="<script>alert(1)</script>")
    made = certificate(decode_run(layers=4, fingerprint=hostile), objectives=slo.parse("ttft<500ms"))
    report.write(folder, made)
    return folder


def test_the_report_is_one_page_that_fetches_nothing_and_runs_nothing(page: Path) -> None:
    from html.parser import HTMLParser

    text = (page / "index.html").read_text()
    tags: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attributes)))

    Reader().feed(text)
    assert {tag for tag, _ in tags} & {"script", "link", "iframe", "img", "object"} == set()
    for _, attributes in tags:
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        assert all(str(v).startswith("#") for n, v in attributes.items() if n in ("href", "xlink:href"))
    assert "@import" not in text and "prefers-color-scheme:dark" in text
    assert "Only 4 of the model’s 16 layers ran" in text and "MISSED" in text
    assert sum(tag == "svg" for tag, _ in tags) == 3


def test_no_picture_is_empty_and_no_two_names_of_a_picture_overlap() -> None:
    pytest.importorskip("matplotlib", reason="reports need the extra `plots`")
    from autosel.certify.plots import pictures

    run = decode_run()
    assert set(pictures(certificate(dataclasses.replace(run, per_op=())))) == {"latency"}
    found = pictures(certificate(run))
    assert set(found) == {"roofline", "ops", "latency"}
    for name, figure in found.items():
        figure.draw_without_rendering()
        texts = [t for t in figure.axes[0].texts if t.get_text()]
        boxes = [t.get_window_extent() for t in texts] + [figure.axes[0].get_legend().get_window_extent()]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2)), name


def test_the_report_of_a_run_without_a_baseline_shows_no_speedup(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="reports need the extra `plots`")
    from autosel.certify import report

    report.write(tmp_path, certificate(ALONE))
    text = (tmp_path / "index.html").read_text()
    shown = text[: text.index("<h2>Check it")]
    assert "over the baseline" not in shown and "to the first token" in shown and "baseline, median" not in shown
    assert "40 after 10 to warm up" in shown and "in untimed passes of PyTorch" in shown


def test_a_report_can_be_compared_with_and_holds_the_certificate_itself(page: Path) -> None:
    [figure] = compare.read(page)
    assert figure.what.startswith("llama-1b[4/16 layers]")
    text = (page / "report.json").read_text()
    (page / "touched.json").write_text(text.replace('"warmup": 10', '"warmup": 11'))
    with pytest.raises(BadConfig, match="warmup"):
        compare.read(page / "touched.json")


def test_a_reader_of_the_certificate_loads_no_tensor_library() -> None:
    code = """
import sys
import autosel.certify.verify, autosel.certify.report, autosel.certify.compare, autosel.certify.rerun
sys.exit(", ".join({"torch", "matplotlib", "sqlalchemy", "cryptography"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
