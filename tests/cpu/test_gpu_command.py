"""`./run gpu --device cpu`: every stage of the run on a GPU, for real, on this CPU and a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.halving import LEAST_VISITS

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "benchmarks" / "gpu" / "__main__.py"
STAGES = ("fingerprint", "parity", "sanitizer", "bench", "regret", "tune", "decode")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "AUTOSEL_HOME": str(folder / "home")}
    line = [sys.executable, "-P", str(MAIN), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu")
    (made / "model").mkdir()
    (made / "model" / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture(scope="module")
def dry(folder: Path) -> dict[str, Any]:
    """The records of one run of all stages at one op, by stage."""
    words = ["--device", "cpu", "--out", str(folder / "out"), "--model", str(folder / "model"), "--seq", "128"]
    done = command(folder, *words, "--op", "rmsnorm", "--layers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return {stage: json.loads((folder / "out" / f"{stage}.json").read_text()) for stage in STAGES}


def test_every_stage_runs_to_its_end(dry: dict[str, Any]) -> None:
    for stage, record in dry.items():
        assert sorted(record["units"]) == sorted(record["listed"]), stage
        assert record["listed"], stage
        assert all(found["ok"] for found in record["units"].values()), stage


def test_each_stage_found_what_it_is_there_for(dry: dict[str, Any]) -> None:
    rates = dry["fingerprint"]["units"]["take"]["fingerprint"]["rates"]
    assert rates["read_bytes_per_s@1"]["value"] > 0
    assert dry["parity"]["units"]["rmsnorm cpp:rmsnorm bf16"]["outcome"] == "passed"
    assert "is a CPU" in dry["parity"]["units"]["rmsnorm cuda:rmsnorm bf16"]["reason"]
    (clean,) = dry["sanitizer"]["units"].values()
    assert clean["cases"] >= 8
    (times,) = dry["bench"]["units"].values()
    assert {"torch:rmsnorm", "cpp:rmsnorm"} <= set(times["arms"])
    assert all(cell.get("rounds", 0) >= LEAST_VISITS or cell["left out"] for cell in dry["regret"]["units"].values())
    assert dry["tune"]["units"]["rmsnorm"]["decisions"]
    certificate = dry["decode"]["units"]["batch 1"]["certificate"]
    assert certificate["tokens_per_sec"] > 0
    assert certificate["verification_ok"]


def test_the_summary_has_every_stage(dry: dict[str, Any], folder: Path) -> None:
    for name in ("summary.txt", "summary.md"):
        text = (folder / "out" / name).read_text()
        assert all(stage in text for stage in STAGES)
        assert "cpp:rmsnorm" in text


def test_what_is_done_is_not_done_again(dry: dict[str, Any], folder: Path) -> None:
    """A unit that is missing is all that the same command measures."""
    path = folder / "out" / "parity.json"
    cut = json.loads(path.read_text())
    del cut["units"]["rmsnorm torch:rmsnorm bf16"]
    cut["units"]["rmsnorm cpp:rmsnorm bf16"]["seconds"] = 12345.0
    path.write_text(json.dumps(cut))
    words = ["--device", "cpu", "--out", str(folder / "out"), "--model", str(folder / "model"), "--seq", "128"]
    done = command(folder, *words, "--op", "rmsnorm", "--layers", "1", "--stage", "parity")
    assert done.returncode == 0, done.stderr
    again = json.loads(path.read_text())["units"]
    assert again["rmsnorm cpp:rmsnorm bf16"]["seconds"] == 12345.0
    assert again["rmsnorm torch:rmsnorm bf16"]["outcome"] == "passed"


def test_a_unit_beyond_its_deadline_costs_itself_alone(folder: Path) -> None:
    words = ["--device", "cpu", "--out", str(folder / "late"), "--model", str(folder / "model"), "--op", "rmsnorm"]
    done = command(folder, *words, "--stage", "parity", "--unit-seconds", "0.001s")
    assert done.returncode == 1
    record = json.loads((folder / "late" / "parity.json").read_text())
    assert set(record["units"]) == set(record["listed"])
    assert "took longer" in record["units"]["rmsnorm cpp:rmsnorm bf16"]["error"]


def test_without_a_gpu_it_says_so_and_what_to_do(folder: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command(folder)
    assert done.returncode == 2
    assert "no GPU found" in done.stderr
    assert "--device cpu" in done.stderr


@pytest.mark.parametrize("words", [("--device", "h200"), ("--op", "gemw"), ("--stage", "parity", "--from", "tune")])
def test_a_wrong_word_is_refused_before_anything_runs(folder: Path, words: tuple[str, ...]) -> None:
    device = () if "--device" in words else ("--device", "cpu")
    done = command(folder, *device, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
