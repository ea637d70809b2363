"""Check that `run` refuses before it loads weights, which takes minutes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.certify import run as run_once
from autosel.certify import run_suite, run_sweep
from autosel.cli.main import run
from autosel.decode.measure import refuse
from autosel.decode.run import Plan
from autosel.decode.weights import OTHERS_BYTES, PROBE_BYTES, arena_bytes, cache_bytes, memory_need, reference_bytes
from autosel.errors import UsageError
from autosel.models.passes import CHUNK, PASS
from tests.llama import write_config

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "torch_dtype": "float32"}


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("weights were loaded first")

    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path))
    for module in (run_once, run_suite, run_sweep):
        monkeypatch.setattr(module, "load_weights", loaded)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "whole", "dtype": "fp32"}, "heads of 256: 32 lanes hold 128 elements of fp32"),
        ({"step": "whole", "batch": 9}, "batch 9: one launch multiplies at most 8 rows"),
        ({"step": "whole", "cache": "paged"}, "a whole step reads a contiguous cache"),
        ({"step": "whole", "prealloc": False}, "preallocated buffers"),
        ({"step": "graph", "advance": True}, "a graph holds one context length"),
        ({"step": "graph", "prealloc": False}, "a graph writes into preallocated buffers"),
    ],
)
def test_a_step_that_a_gpu_cannot_launch_or_replay_is_refused_first(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse(Plan(model=models.load("gemma3-1b"), device="cuda", **changes))
    assert said in caught.value.why
    refuse(Plan(model=models.load("gemma3-1b"), device="cuda", step="whole"))


def test_a_suite_that_does_not_fit_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autosel.devices.cpu.machine.free_memory", lambda: 1 << 20)
    assert run(["run", "--suite", "quick", "--layers", "1"]) == 2
    assert "of memory" in capsys.readouterr().err


def test_on_a_gpu_the_reference_holds_keys_and_values_once_for_every_query_head() -> None:
    plan = Plan(model=models.load("llama-8b"), prompt="synthetic", batch=64, seq=4096, device="cuda")
    s, tokens = plan.shape, plan.batch * plan.longest
    laid_out = 4 * tokens * s.D * (2 * s.Hkv + 3 * s.Hq)  # wide; then by query head: keys, values, scaled keys
    held = arena_bytes(s, plan.dtype) + cache_bytes(plan)
    assert memory_need(plan) >= held + laid_out + PROBE_BYTES + OTHERS_BYTES


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_a_rope_that_cannot_be_decoded_is_refused_first(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    scaling |= {"long_factor": [1.0] * 16, "short_factor": [1.0] * 16} if kind == "longrope" else {}
    write_config(tmp_path, **SIZES, rope_scaling=scaling)
    assert run(["run", "--model", str(tmp_path), "--seq", "16", "--iters", "2"]) == 2
    assert f"rope type '{kind}' cannot be decoded yet" in " ".join(capsys.readouterr().err.split())


def test_a_prompts_activations_count_as_memory_of_a_run_unless_it_is_synthetic() -> None:
    plan = Plan(model=models.load("llama-1b"), batch=53, seq=8192)
    s = plan.shape
    more = memory_need(plan) - memory_need(replace(plan, prompt="synthetic"))
    gated, stream = 3 * CHUNK * s.I * 2, PASS * (2 * s.d + s.Hq * s.D) * 2
    assert more + reference_bytes(plan) >= gated + stream
    assert memory_need(replace(plan, model=models.load("llama-8b"), batch=1)) < 24 << 30  # and stays bounded
    short = replace(plan, batch=1, seq=16)
    assert memory_need(short) == memory_need(replace(short, prompt="synthetic"))  # judging the prompt needs more


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"model.safetensors.index.json": '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}'},
         "lacks model-00001-of-00002.safetensors"),
        ({"model.safetensors.index.json": json.dumps({"weight_map": {"lm_head.weight": "n" * 300}})}, "lacks nnn"),
        ({"pytorch_model.bin": ""}, "is a pickle"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", [("run",), ("sweep",)])
def test_a_checkpoint_without_its_weights_is_refused_not_measured_with_random_ones(
    held: dict[str, str], said: str, verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("autosel.certify.run_sweep._tuned", lambda *_: pytest.fail("it was tuned first"))
    write_config(tmp_path / "m", **SIZES)
    for name, content in held.items():
        (tmp_path / "m" / name).write_text(content)
    context = ("--seq", "8") if verb == ("run",) else ("--context", "8")
    assert run([*verb, "--model", str(tmp_path / "m"), *context, "--iters", "1", "--warmup", "0"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
