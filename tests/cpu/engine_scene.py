"""Run a serving engine's process with autosel's plug-in: its decisions, its exported tiles, and the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autosel import ops, settings
from autosel.testing.serving import serve
from autosel.values import Workload
from tests import engines

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
    kept = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    given = {"PYTHONPATH": os.pathsep.join(filter(None, (engines.paths(engine), str(plug or ""))))}
    given |= {"AUTOSEL_HOME": str(settings.home()), "AUTOSEL_ENGINE_FILES": str(files), "DECIDED": str(home)}
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + script + END],
        env=kept | given | environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


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
