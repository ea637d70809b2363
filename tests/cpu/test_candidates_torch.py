"""Test PyTorch's candidates, and a candidate that a script defines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.candidates import registry
from autosel.candidates.base import Candidate
from autosel.candidates.load import load
from autosel.models.workloads import ASKED_OPS, STEP_OPS
from autosel.ops import OPS
from autosel.ops.contract import Match
from autosel.values import Accepted, DTypeName, PythonRecipe, Rejected, Workload, from_json
from tests.null.test_candidates import CPU

pytestmark = pytest.mark.usefixtures("preforked")


def tiny(name: str) -> models.ModelShape:
    """Return the preset's kind of layers at sizes that float64 checks in milliseconds."""
    shape = models.load(name)
    rope = replace(shape.rope, rotary_dim=32)
    return replace(
        shape, layers=2, layer_types=shape.layer_types[4:6], d=96, Hq=4, Hkv=2, D=32, I=160, V=500, rope=rope,
        window=16 if shape.window else 0, rope_local=None,
    )  # fmt: skip


def workloads_of_a_step() -> list[Any]:
    everything = (*STEP_OPS, *ASKED_OPS)
    found: dict[str, Workload] = {}
    for name in ("llama-1b", "qwen3-0.6b", "gemma3-1b"):
        for batch in (1, 3):
            for w in models.workloads(tiny(name), batch=batch, context=40, ops=everything):
                found[w.key] = w
    return [pytest.param(w, id=w.key) for w in found.values()]


def callable_of(candidate: Candidate, w: Workload) -> Any:
    knobs = candidate.knobs(w, CPU)
    return load(OPS[w.op], candidate.recipe(w, CPU, knobs), "", knobs.values)


# --- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("w", workloads_of_a_step())
def test_every_torch_candidate_is_right_at_every_workload_of_a_step(w: Workload, dtype: DTypeName) -> None:
    op, w = OPS[w.op], replace(w, dtype=dtype)
    ways = [c for c, s in registry.eligible(w, CPU) if c.backend == "TORCH" and isinstance(s, Accepted)]
    assert registry.baseline(w.op) in ways
    for way in ways:
        call = callable_of(way, w)
        for outputs in ([None for _ in op.allocate(w)], op.allocate(w, fill=float("nan"))):
            got = call(*op.arguments(op.inputs(w, 5)), *outputs)
            got = got if isinstance(got, tuple) else (got,)
            assert isinstance(op.verify(op.inputs(w, 5), got), Match), way.name
            assert {id(o) for o in outputs if o is not None} <= {id(t) for t in got}


def test_packed_attention_supports_decode_only() -> None:
    decode = OPS["attn"].workload("bf16", {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 64, "L": 128})
    packed = registry.find("attn", "torch:packed")
    assert isinstance(packed.supports(decode, CPU), Accepted)
    refused = packed.supports(decode.at(S=4), CPU)
    assert isinstance(refused, Rejected)
    assert "S = 4" in refused.reason


# --- a user's script -------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import autosel

@autosel.candidate("swiglu", name="scripted")
def scripted(gate, up):
    import torch
    return torch.nn.functional.silu(gate) * up

if __name__ == "__main__":
    from autosel.candidates import registry
    from autosel.values import Fingerprint, Knobs, Workload, to_json
    w = Workload(op="swiglu", dims=(("M", 1), ("I", 8)), dtype="fp32")
    fp = Fingerprint(kind="cpu", name="", identity={}, environment={}, rates={})
    print(json.dumps(to_json(registry.find("swiglu", "user:scripted").recipe(w, fp, Knobs()))))
"""


def test_a_candidate_defined_in_a_script_can_be_loaded_by_another_process(tmp_path: Path) -> None:
    script = tmp_path / "tuning_script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, cwd="/", timeout=120, check=True
    )
    recipe = from_json(PythonRecipe, json.loads(ran.stdout))
    assert recipe == PythonRecipe(target="tuning_script:scripted", path=str(tmp_path))
    op = OPS["swiglu"]
    w = op.workload("fp32", {"M": 2, "I": 8})
    inputs = op.inputs(w, 1)
    before = list(sys.path)
    try:
        got = load(op, recipe, "", {})(*op.arguments(inputs), None)
    finally:
        sys.path[:] = before
        sys.modules.pop("tuning_script", None)
    assert isinstance(op.verify(inputs, (got,)), Match)
