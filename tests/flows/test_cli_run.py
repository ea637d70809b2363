"""Test `run` on this machine: measure a tiny model, then check, rerun and edit its certificate."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from autosel.certify import compare, suite
from autosel.certify.certificate import decode, encode, seal
from autosel.decode.measure import EARLIER
from autosel.values import digest
from tests import steps, verbs
from tests.llama import write_config

RUN = ("--seq", "96", "--iters", "20", "--warmup", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    write_config(made / "tiny", num_hidden_layers=4)
    return made


def verb(*arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
    return verbs.verb(*arguments, "--json", codes=codes)


def tiny(folder: Path) -> tuple[str, ...]:
    return "run", "--model", str(folder / "tiny"), "--certify", str(folder / "c.jsonl")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Any]:
    """Return the JSON of a run that meets one objective and misses another."""
    wanted = ("--audit", str(folder / "audit.json"), "--trace", str(folder / "trace.json"))
    objectives = ("--slo", "tps>0.001,itl<0.001us")
    found: dict[str, Any] = verb(*tiny(folder), *RUN, *wanted, *objectives, codes=(3,))
    return found


def test_a_run_writes_a_verified_certificate(ran: dict[str, Any], folder: Path) -> None:
    made = ran["certificate"]
    assert made["iters"] == 20 == len(made["samples"]["optimised_ns"]) and made["warmup"] == 2
    assert made["verification_ok"] and made["layers"] == {"run": 4, "of": 4}
    assert made["tokens_per_sec"] == pytest.approx(1000 / made["latency_ms"]["med"])
    assert made["read_bytes_per_s"] >= max(made["read_probes"]) > 0 and made["ttft_ms"] > 0
    assert [judged["met"] for judged in made["slo"]] == [True, False] and ran["error"]["exit_code"] == 3
    assert json.loads((folder / "c.jsonl").read_bytes().splitlines()[0]) == made
    each = made["mode"].startswith("eager.")  # a thread team makes the whole step in one call
    for label, o in made["per_op"].items():
        assert o["served"] == {o["candidate"]: 20 * o["calls"]} or not (each or o["served"]), label


def test_its_audit_and_trace_account_for_the_step(ran: dict[str, Any], folder: Path) -> None:
    found = json.loads((folder / "audit.json").read_text())
    assert sum(r["share"] for r in found["rows"]) + found["rest_share"] == pytest.approx(1)
    assert {"attn", "lm_head"} <= {r["label"] for r in found["rows"]}
    slices = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(e["cat"] == "step" for e in slices) == 40


def test_a_rerun_measures_the_same_plan_and_reports_if_it_was_reproduced(ran: dict[str, Any], folder: Path) -> None:
    found = verb("verify", "--rerun", f"{folder / 'c.jsonl'}:1", codes=(0, 3, 5))  # messages about a busy machine vary
    assert found["rerun"]["outcome"] in ("reproduced", "faster", "slower", "too noisy")
    assert found["rerun"]["speedup"]["certified"] == ran["certificate"]["speedup"]


def test_a_run_of_some_layers_is_marked_not_compared_with_others_and_chained(ran: dict[str, Any], folder: Path) -> None:
    part = verb(*tiny(folder), "--seq", "32", "--iters", "3", "--warmup", "0", "--layers", "2")["certificate"]
    assert part["model"].endswith("[2/4 layers]") and part["layers"] == {"run": 2, "of": 4}
    assert part["previous"] == ran["certificate"]["checksum"]
    assert verb("verify", str(folder / "c.jsonl"))["certificates"] == 2
    short = ("--seq", "32", "--iters", "3", "--warmup", "0", "--compare", str(folder / "c.jsonl"))
    assert "nothing to compare" in verb(*tiny(folder), *short, codes=(2,))["error"]["what"]


def test_a_prompt_from_a_file_is_certified_by_its_digests(ran: dict[str, Any], folder: Path) -> None:
    assert ran["certificate"]["prompt"]["file_sha256"] == ""
    (folder / "prompt.json").write_text(json.dumps([*range(20)]))
    words = ("--seq", "9", "--iters", "2", "--warmup", "0", "--layers", "1", "--prompt", str(folder / "prompt.json"))
    found = verb(*tiny(folder), *words)["certificate"]
    assert found["prompt"]["tokens_sha256"] == sha256(b"[[0,1,2,3,4,5,6,7]]").hexdigest()
    assert found["prompt"]["file_sha256"] == sha256((folder / "prompt.json").read_bytes()).hexdigest()


def test_another_machines_certificate_is_not_run_again_here(ran: dict[str, Any], folder: Path) -> None:
    line = (folder / "c.jsonl").read_bytes().splitlines()[0]
    made = decode(line)
    identity = {**(made.identity or {}), "model": "Other CPU"}
    env_id = digest({"hw_id": digest(identity), **made.environment})
    other = seal(replace(made, identity=identity, hw_id=digest(identity), env_id=env_id, device="Other CPU"))
    (folder / "other.jsonl").write_bytes(encode(other) + b"\n")
    found = verb("verify", "--rerun", str(folder / "other.jsonl"), codes=(2,))
    assert "another device" in found["error"]["what"]


def test_a_sweep_measures_every_cell_and_weights_them_by_traffic(folder: Path) -> None:
    (folder / "lengths.txt").write_text("20 30\n")
    grid = ("--context", "32:64", "--batch", "1:2", "--layers", "1", "--iters", "2", "--warmup", "0", "--no-tune")
    wanted = ("--trace-file", str(folder / "lengths.txt"), "--report", str(folder / "swept"))
    found = verb("sweep", "--model", str(folder / "tiny"), *grid, *wanted)["sweep"]
    assert [(c["batch"], c["context"]) for c in found["cells"]] == [(1, 32), (1, 64), (2, 32), (2, 64)]
    assert all(c["figures"]["verified"] and c["figures"]["p50_ms"] > 0 for c in found["cells"])
    assert {"attn", "lm_head"} <= {s["op"] for s in found["cells"][0]["figures"]["serving"]}
    assert [w["covered"] for w in found["traffic"]["by_batch"]] == [1, 1]
    assert json.loads((folder / "swept" / "sweep.json").read_text())["sweep"] == found
    assert (folder / "swept" / "step-against-context.png").read_bytes().startswith(b"\x89PNG")


def test_a_quick_suite_certifies_its_configurations_and_can_be_compared_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the first configuration and the last; tests/soak/test_suite.py runs all."""
    monkeypatch.setattr(suite, "CONFIGURATIONS", (suite.CONFIGURATIONS[0], suite.CONFIGURATIONS[-1]))
    shortest = replace(suite.LEVELS["quick"], shorter=64)  # answers of 16 tokens: the probes of memory take the time
    monkeypatch.setitem(suite.LEVELS, "quick", shortest)
    made, report = folder / "suite.jsonl", folder / "suite"
    words = ("run", "--model", str(folder / "tiny"), "--suite", "quick", "--layers", "1")
    found = verb(*words, "--certify", str(made), "--report", str(report))
    rows = found["suite"]["rows"]
    assert [(r["configuration"], r["tokens"]) for r in rows] == [(c.name, 16) for c in suite.CONFIGURATIONS]
    assert all(r["ttft_ms"] > 0 and r["decode_tokens_per_s"] > 0 and r["model"].endswith("[1/4 layers]") for r in rows)
    assert found["error"] is None and verb("verify", str(made))["certificates"] == 2
    last = decode(made.read_bytes().splitlines()[-1])
    assert last.options["cache"] == "paged" and last.options["temperature"] == 0.8 and EARLIER in last.notes
    before = compare.read(report)
    assert [c.speedup for c in compare.compare(before, before)] == [1.0] * 2


def test_a_text_is_scored_by_the_path_that_was_timed(ran: dict[str, Any], folder: Path) -> None:
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 2)
    short = ("--seq", "32", "--iters", "2", "--warmup", "0", "--batch", "2", "--layers", "2")
    made = verb(*tiny(folder), *short, "--quality", str(folder / "text.txt"))["certificate"]
    found = made["quality"]
    assert found["tokenizer"] == "bytes" and found["tokens"] == 2 * (106 // 2 - 1)
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=0.02)
    assert 0 < found["mean_divergence"] < 1e-3 and not found["suspect"]
    assert verb("verify", str(folder / "c.jsonl"))["certificates"] >= 2


def test_a_written_format_is_scored_against_its_original_and_again(folder: Path) -> None:
    original, codes, text = folder / "original", folder / "codes", folder / "ids.json"
    steps.write_model(original, "llama")
    verb("quantise", str(original), "--format", "int4-g32", "-o", str(codes))
    text.write_text(json.dumps([(7 * i + i * i // 3) % steps.VOCABULARY for i in range(300)]))
    asked = ("run", "--model", str(codes), "--original", str(original), "--quality", str(text), "--step", "ops")
    short = ("--seq", "16", "--iters", "8", "--warmup", "0", "--certify", str(folder / "format.jsonl"))
    refused = verb(*asked, *short, codes=(2,))["error"]
    assert "at least 4096 are needed" in refused["why"] and "--accept-quality" in refused["todo"]
    made = verb(*asked, *short, "--accept-quality")["certificate"]
    found = made["format_quality"]
    assert found["original"] == str(original) and found["accepted"] is True and 200 < found["tokens"] < 300
    assert made["quality"]["mean_divergence"] < found["mean_divergence"] <= found["p999_divergence"]
    assert verb("verify", str(folder / "format.jsonl"))["certificates"] == 1
    again = verb("verify", "--rerun", str(folder / "format.jsonl"), codes=(0, 3, 5))["rerun"]
    assert again["format"]["why"] == "" and again["format"]["certified"] == pytest.approx(found["difference"])
