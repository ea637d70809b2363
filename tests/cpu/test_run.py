"""`run` on this machine's cores: a tiny model measured for real, its certificate checked, run again, and touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
RUN = ("--seq", "96", "--iters", "30", "--warmup", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "tiny").mkdir()
    (made / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    return made


def verb(folder: Path, *arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
    """Run a verb in a process of its own: its JSON document."""
    done = subprocess.run(
        [sys.executable, "-m", "autosel.cli.main", *arguments, "--json"],
        env={**os.environ, "AUTOSEL_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in codes, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Any]:
    wanted = ("--audit", str(folder / "audit.json"), "--trace", str(folder / "trace.json"), "--slo", "tps>0.001")
    found: dict[str, Any] = verb(folder, "run", "--model", str(folder / "tiny"), *RUN, *wanted)
    return found


def test_a_run_leaves_a_verified_certificate_of_what_it_did(ran: dict[str, Any], folder: Path) -> None:
    made = ran["certificate"]
    assert made["iters"] == 30 == len(made["samples"]["optimised_ns"]) and made["warmup"] == 3
    assert made["verification_ok"] and made["layers"] == {"run": 4, "of": 4}
    assert made["tokens_per_sec"] == pytest.approx(1000 / made["latency_ms"]["med"])
    assert made["slo"][0]["met"] and ran["error"] is None
    assert made["read_bytes_per_s"] > 0 and made["ttft_ms"] > 0
    line = (folder / "home" / "certificates.jsonl").read_bytes()
    assert json.loads(line) == made
    assert verb(folder, "verify")["certificates"] == 1


def test_its_audit_and_trace_account_for_the_step(ran: dict[str, Any], folder: Path) -> None:
    found = json.loads((folder / "audit.json").read_text())
    assert sum(r["share"] for r in found["rows"]) + found["rest_share"] == pytest.approx(1)
    assert {"attn", "lm_head"} <= {r["label"] for r in found["rows"]}
    slices = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(e["cat"] == "step" for e in slices) == 60


def test_a_rerun_measures_the_same_plan_and_says_whether_it_came_out(ran: dict[str, Any], folder: Path) -> None:
    found = verb(folder, "verify", "--rerun", codes=(0, 3, 5))  # what a busy machine says is not the test's to promise
    assert found["rerun"]["outcome"] in ("reproduced", "faster", "slower", "too noisy")
    assert found["rerun"]["speedup"]["certified"] == pytest.approx(ran["certificate"]["speedup"], rel=0.1)


def test_a_part_and_a_missed_objective_are_said_and_chained(ran: dict[str, Any], folder: Path) -> None:
    part = verb(
        folder, "run", "--model", str(folder / "tiny"), *RUN, "--layers", "2", "--certify", str(folder / "c.jsonl")
    )
    assert part["certificate"]["model"].endswith("[2/4 layers]")
    short = ("--seq", "32", "--iters", "5", "--warmup", "0", "--slo", "itl<0.001us")
    missed = verb(
        folder, "run", "--model", str(folder / "tiny"), *short, "--certify", str(folder / "c.jsonl"), codes=(3,)
    )
    assert missed["error"]["exit_code"] == 3
    assert missed["certificate"]["previous"] == part["certificate"]["checksum"]
    assert verb(folder, "verify", str(folder / "c.jsonl"))["certificates"] == 2


def test_another_machines_certificate_is_not_run_again_here(ran: dict[str, Any], folder: Path) -> None:
    from autosel.certify.certificate import decode, encode, seal

    line = (folder / "home" / "certificates.jsonl").read_bytes().splitlines()[0]
    from dataclasses import replace

    other = seal(replace(decode(line), hw_id="ab" * 32, device="Other CPU"))
    (folder / "other.jsonl").write_bytes(encode(other) + b"\n")
    found = verb(folder, "verify", "--rerun", str(folder / "other.jsonl"), codes=(2,))
    assert "another device" in found["error"]["what"]
