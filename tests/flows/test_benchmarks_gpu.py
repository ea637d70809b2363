"""Test `./run gpu --device cpu` with real work on this CPU and a tiny model: a quarter of the stages each day.

tests/soak/test_gpu_command.py runs all stages, and ends a run while a verb that it has started works.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.halving import LEAST_VISITS
from tests import drawn
from tests.llama import write_config

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "benchmarks" / "gpu" / "__main__.py"
PROOFS, RACES = ("parity", "sanitizer", "graph"), ("containment", "bench")
TIMES, STEPS = ("fingerprint", "regret"), ("tune", "decode", "sweep", "engines")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}
TODAY = [stage for part in drawn.share((PROOFS, TIMES, RACES, STEPS), days=4) for stage in part]


def dry_run(folder: Path, out: str = "out") -> list[str]:
    """Return the words of a run with a tiny model on this CPU."""
    return ["--device", "cpu", "--out", str(folder / out), "--model", str(folder / "model"), "--seq", "128"]


def command(folder: Path, *words: str, limit_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "AUTOSEL_HOME": str(folder / "home")}
    line = [sys.executable, "-P", str(MAIN), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=limit_s, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu")
    write_config(made / "model", **SIZES)
    return made


WORDS = ("take", "cpp:rmsnorm", "cuda:rmsnorm", "rmsnorm/", "whole step", "illegal", "batch 1", "contexts")
WORDS += ("vllm", "transformers")


@pytest.fixture(scope="module")
def dry(folder: Path) -> dict[str, Any]:
    """Return the records of one run of today's stages with one op; the soak tier runs all units of all ops."""
    words = ["--contexts", "64:64", "--keep", str(folder / "checkout"), *(f"--unit={word}" for word in WORDS)]
    words += ["--op", "rmsnorm", "--layers", "1", *(f"--stage={stage}" for stage in TODAY)]
    done = command(folder, *dry_run(folder), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return {stage: json.loads((folder / "out" / f"{stage}.json").read_text()) for stage in TODAY}


def test_every_stage_runs_to_its_end(dry: dict[str, Any]) -> None:
    for stage, record in dry.items():
        assert set(record["units"]) == {unit for unit in record["listed"] if any(word in unit for word in WORDS)}, stage
        assert record["units"], stage
        assert all(found["ok"] for found in record["units"].values()), stage


def test_stages_of_proofs_have_their_expected_results(dry: dict[str, Any]) -> None:
    if "parity" not in dry:
        pytest.skip("another day")
    assert dry["parity"]["units"]["rmsnorm cpp:rmsnorm bf16"]["outcome"] == "passed"
    assert dry["parity"]["units"]["rmsnorm cpp:rmsnorm bf16 M4.d256.offset=1.0"]["outcome"] == "passed"
    assert "is a CPU" in dry["parity"]["units"]["rmsnorm cuda:rmsnorm bf16"]["reason"]
    assert all(clean["cases"] >= 8 for clean in dry["sanitizer"]["units"].values())
    assert dry["graph"]["units"]["rmsnorm cpp:rmsnorm bf16"]["outcome"] == "right"
    step = dry["graph"]["units"]["a whole step"]
    assert step["outcome"] == "right" and step["eager_ms"] > 0


def test_stages_of_races_have_their_expected_results(dry: dict[str, Any]) -> None:
    if "bench" not in dry:
        pytest.skip("another day")
    (times,) = dry["bench"]["units"].values()
    assert {"torch:rmsnorm", "cpp:rmsnorm"} <= set(times["arms"])
    fault = dry["containment"]["units"]["illegal_access"]
    assert (fault["outcome"], fault["behind"]) == ("contained", "passed") and "SIGSEGV" in fault["cause"]


def test_stages_of_times_have_their_expected_results(dry: dict[str, Any]) -> None:
    if "regret" not in dry:
        pytest.skip("another day")
    rates = dry["fingerprint"]["units"]["take"]["fingerprint"]["rates"]
    assert rates["read_bytes_per_s@1"]["value"] > 0
    assert all(cell.get("rounds", 0) >= LEAST_VISITS or cell["left out"] for cell in dry["regret"]["units"].values())


def test_stages_of_steps_have_their_expected_results(dry: dict[str, Any]) -> None:
    if "decode" not in dry:
        pytest.skip("another day")
    assert dry["tune"]["units"]["rmsnorm model batch 1"]["decisions"]
    certificate = dry["decode"]["units"]["batch 1"]["certificate"]
    assert certificate["tokens_per_sec"] > 0
    assert certificate["verification_ok"]
    (cell,) = dry["sweep"]["units"]["contexts"]["sweep"]["cells"]
    assert cell["figures"]["verified"]
    assert "is not installed" in dry["engines"]["units"]["vllm"]["reason"]
    patched = dry["engines"]["units"]["transformers"]
    assert patched["outcome"] == "served" and "rmsnorm" in patched["ours"]["served"]
    assert patched["ours"]["tokens_per_s"] > 0


def test_keep_stores_results_in_the_checkout(dry: dict[str, Any], folder: Path) -> None:
    """Keep all results except data of this machine."""
    (kept,) = (folder / "checkout" / "benchmarks" / "results").iterdir()
    names = {path.name for path in kept.iterdir()}
    assert names >= {*(f"{stage}.json" for stage in TODAY), "summary.md"}
    assert ("certificates.jsonl" in names) == ("decode" in TODAY)
    for stage in TODAY:
        assert str(folder / "home") not in (kept / f"{stage}.json").read_text(), stage


def test_the_summary_has_each_stage(dry: dict[str, Any], folder: Path) -> None:
    for name in ("summary.txt", "summary.md"):
        text = (folder / "out" / name).read_text()
        assert all(stage in text for stage in TODAY)
        assert "cpp:rmsnorm" in text or "parity" not in TODAY


def begun(folder: Path, out: str, *, stage: str = "graph", unit: int = 2) -> subprocess.Popen[str]:
    """Start a run, and return when it is at its `unit`-th unit."""
    environment = {**os.environ, "AUTOSEL_HOME": str(folder / "home")}
    line = [sys.executable, "-P", str(MAIN), *dry_run(folder, out), "--op", "rmsnorm", "--stage", stage]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    running = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    assert running.stderr is not None
    told = next(line for line in running.stderr if line.startswith(f"[{stage}] {unit}/"))
    assert told
    return running


def resumed(folder: Path, out: str) -> None:
    """Run the same command again, which continues after the finished units."""
    before = json.loads((folder / out / "graph.json").read_text())
    assert 0 < len(before["units"]) < len(before["listed"])
    done = command(folder, *dry_run(folder, out), "--op", "rmsnorm", "--stage", "graph")
    assert done.returncode == 0, done.stderr
    after = json.loads((folder / out / "graph.json").read_text())
    assert set(after["units"]) == set(after["listed"])
    assert all(after["units"][name] == found for name, found in before["units"].items())
    assert after["started"] == before["started"]


def test_an_interrupt_ends_it_and_the_same_command_continues(folder: Path) -> None:
    """Send Ctrl-C to the foreground group."""
    running = begun(folder, "interrupted")
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "the same command continues" in said and "Traceback" not in said
    resumed(folder, "interrupted")


@pytest.mark.parametrize("words", [("--device", "h200"), ("--op", "gemw"), ("--stage", "parity", "--from", "tune")])
def test_an_invalid_argument_is_refused_before_anything_runs(folder: Path, words: tuple[str, ...]) -> None:
    device = () if "--device" in words else ("--device", "cpu")
    done = command(folder, *device, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
