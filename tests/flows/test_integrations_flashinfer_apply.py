"""Serve decided kernels behind FlashInfer's functions, by its own trace_apply; with the published wheel, on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import ops, settings
from autosel.fingerprint import known
from autosel.integrations import flashinfer_apply
from autosel.native.compile import find_compiler
from autosel.testing.serving import arm_of, pinned, serve
from autosel.values import Decision, Workload
from tests import engines
from tests.cpu.engine_scene import last_line
from tests.null.cuda_stand_in import OnGpu

BEGIN = """
import json, os, torch
torch.set_grad_enabled(False)
import flashinfer, autosel
if not torch.cuda.is_available():  # a build of PyTorch without CUDA cannot answer, and there is no stream to capture
    torch.cuda.is_current_stream_capturing = lambda: False
from autosel.errors import UsageError
from autosel.integrations import flashinfer_apply
said = {}
torch.manual_seed(1)
"""
SCRIPT = """
try:
    flashinfer_apply.enable(rms_eps=1e-5)
except UsageError as error:
    said["refused"] = str(error)
applied = flashinfer_apply.enable(rms_eps=1e-6)
said["names"] = applied.names
try:
    flashinfer_apply.enable(rms_eps=1e-6)
except UsageError as error:
    said["twice"] = str(error)
x, r, w = torch.randn(2, 64), torch.randn(2, 64), torch.randn(64)
def reference(x):
    return (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()).float()
def close(a, b):
    return bool(torch.allclose(a, b, rtol=1e-5, atol=1e-5))
want, total = reference(x + r), x + r
said["norm"] = close(flashinfer.norm.rmsnorm(x, w), reference(x))
flashinfer.norm.fused_add_rmsnorm(x, r, w)
said["both"] = [close(x, want), close(r, total)]
many = torch.randn(40, 64)
said["undecided"] = close(flashinfer.norm.rmsnorm(many, w), reference(many))
said["uses"] = sorted({u.op for u in autosel.uses() if u.calls and u.candidate.startswith("cpp:")})
# A layer of vLLM's that calls FlashInfer: what was decided reaches it without vLLM knowing.
from vllm.models.minimax_m3.nvidia.model import MiniMAXGemmaRMSNorm
layer = MiniMAXGemmaRMSNorm(96)
layer.weight.normal_()
w = 1 + layer.weight
x = torch.randn(2, 96)
said["vllm"] = close(layer(x), reference(x))
said["vllm uses"] = sorted(u.candidate for u in autosel.uses() if u.calls and "d96" in u.bucket)
said["stats"] = sorted(s["hit"] for s in flashinfer.trace_apply.stats().values())
flashinfer_apply.disable()
said["off"] = flashinfer.trace_apply.is_enabled()
print(json.dumps(said))
"""

# SGLang's norms on a GPU are sgl_kernel's, which call FlashInfer in half precision. Importing the whole package loads
# its CUDA library, so only its Python files are imported here, under the names that SGLang uses with a GPU.
SGLANG = """
import importlib.util, sys, types
from sglang.srt.layers import layernorm
torch.set_default_dtype(torch.bfloat16)
shell = types.ModuleType("sgl_kernel")
shell.__path__ = [os.path.dirname(importlib.util.find_spec("sgl_kernel").origin)]
sys.modules["sgl_kernel"] = shell
from sgl_kernel import elementwise
names = ("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm")
for name in names:
    setattr(layernorm, name, getattr(elementwise, name))
said["names"] = flashinfer_apply.enable(rms_eps=1e-6).names
x, r = torch.randn(2, 64), torch.randn(2, 64)
plain, around_one = layernorm.RMSNorm(64, eps=1e-6), layernorm.GemmaRMSNorm(96, eps=1e-6)
for norm in (plain, around_one):
    norm.weight.data.normal_()
def reference(x, w):
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()
def close(a, b):  # two roundings to bf16, of the sum and of the result: 2^-9 each, and fp32 between them
    return bool(torch.allclose(a.double(), b, rtol=2**-8 + 2**-16, atol=0))
said["norm"] = close(plain.forward_cuda(x), reference(x, plain.weight))
total = x + r
y, added = plain.forward_cuda(x.clone(), r.clone())
said["both"] = [close(y, reference(total, plain.weight)), close(added, total.double())]
z = torch.randn(2, 96)
said["gemma"] = close(around_one.forward_cuda(z), reference(z, 1 + around_one.weight.double()))
said["uses"] = sorted({u.op + " " + u.candidate for u in autosel.uses() if u.calls})
said["stats"] = {n: s["hit"] for n, s in flashinfer.trace_apply.stats().items()}
print(json.dumps(said))
"""


def heard(script: str, home: Path, *engines_: str, **environment: str) -> dict[str, Any]:
    """Return a script's notes in `said`, from a separate process that serves from this home."""
    (home / "native").symlink_to(settings.home() / "native")
    given = {"PYTHONPATH": engines.paths(*engines_), "AUTOSEL_HOME": str(home), **environment}
    found: dict[str, Any] = last_line(BEGIN + script, given)
    return found


@pytest.mark.skipif(bool(engines.missing("flashinfer", "vllm")), reason=engines.missing("flashinfer", "vllm"))
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_flashinfers_functions_run_decided_kernels_with_right_results(tmp_path: Path) -> None:
    home = tmp_path / "home"
    shapes = (("rmsnorm", "cpp:rmsnorm"), ("add_rmsnorm", "cpp:add_rmsnorm"))
    plain = [(ops.find(op).workload("fp32", {"M": 2, "d": 64}), name) for op, name in shapes]
    around_one = ops.find("rmsnorm").workload("fp32", {"M": 2, "d": 96}, offset=1.0)
    serve(home, [*plain, (around_one, "cpp:rmsnorm")])
    said = heard(SCRIPT, home, "flashinfer", "vllm", VLLM_TARGET_DEVICE="cpu")
    assert said["names"] == ["fused_add_rmsnorm_h64", "gemma_rmsnorm_h96", "rmsnorm_h64"]
    assert said["vllm"] and said["vllm uses"] == ["cpp:rmsnorm"]
    assert said["norm"] and said["both"] == [True, True] and said["undecided"]
    assert said["stats"] == [1, 1, 2] and said["uses"] == ["add_rmsnorm", "rmsnorm"]
    assert "fixes epsilon at 1e-06" in said["refused"] and "already applies" in said["twice"] and said["off"] is False


SGLANG_PARTS = ("flashinfer", "sglang", "sglang-kernel")


@pytest.mark.skipif(bool(engines.missing(*SGLANG_PARTS)), reason=engines.missing(*SGLANG_PARTS))
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_sglangs_norms_run_decided_kernels_through_flashinfer(tmp_path: Path) -> None:
    plain = [(ops.find(op).workload("bf16", {"M": 2, "d": 64}), f"cpp:{op}") for op in ("rmsnorm", "add_rmsnorm")]
    around_one = ops.find("rmsnorm").workload("bf16", {"M": 2, "d": 96}, offset=1.0)
    said = heard(SGLANG, serve(tmp_path / "home", [*plain, (around_one, "cpp:rmsnorm")]), *SGLANG_PARTS)
    assert said["names"] == ["fused_add_rmsnorm_h64", "gemma_rmsnorm_h96", "rmsnorm_h64"]
    assert said["norm"] and said["both"] == [True, True] and said["gemma"]
    assert said["uses"] == ["add_rmsnorm cpp:add_rmsnorm", "rmsnorm cpp:rmsnorm"]
    assert sorted(said["stats"].values()) == [1, 1, 1]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_definitions_have_flashinfers_names_and_the_rest_a_reason() -> None:
    from autosel.integrations.flashinfer_apply import definitions

    def of(op: str, name: str, dims: dict[str, int], **traits: object) -> Workload:
        return pinned(ops.find(op).workload("fp32", dims, **traits), name)  # type: ignore[arg-type, return-value]

    decided = [
        of("swiglu", "cpp:swiglu", {"M": 1, "I": 64}),
        of("geglu", "cpp:geglu", {"M": 1, "I": 64}, tanh=1),
        of("add_rmsnorm", "cpp:add_rmsnorm", {"M": 1, "d": 32}, offset=1.0),
        of("rmsnorm", "cpp:rmsnorm", {"M": 1, "d": 64}),
        of("rmsnorm", "torch:rmsnorm", {"M": 1, "d": 96}),
    ]
    served, left = definitions(decided, 1e-5)  # type: ignore[arg-type]
    assert sorted(served) == ["gelu_tanh_and_mul_h128", "silu_and_mul_h128"]
    assert len(left) == 2 and "no definition" in left[0] and left[1].startswith("rmsnorm_h64: ")
    assert "rmsnorm_h64" in definitions(decided, 1e-6)[0]  # type: ignore[arg-type]


def small(op: str, **dims: int) -> Decision:
    w = ops.find(op).workload("fp32", dims)
    name = f"torch:{op}"
    return replace(pinned(w, name), baseline=replace(arm_of(w, name), candidate="another", digest="another"))


def test_only_decisions_that_can_serve_flashinfers_calls_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Route only decisions for a GPU, because FlashInfer has no calls on a CPU."""
    d, gpu = small("rmsnorm", M=1, d=64), known.load("h200")
    assert flashinfer_apply.serving([d]) == [d]
    unfit: list[Any] = [
        {"hw_id": "elsewhere"},
        {"state": "demoted"},
        {"state": "undecided"},
        {"mode": "eager.t999.odd"},
    ]
    assert flashinfer_apply.serving([replace(d, **change) for change in unfit]) == []
    monkeypatch.setattr(flashinfer_apply, "places_here", lambda: ("cpu", "cuda:0"))
    monkeypatch.setattr(flashinfer_apply, "device_at", lambda place: (gpu, ""))
    on_gpu = replace(d, hw_id=gpu.hw_id, mode=re.sub(r"t\d+", "t99", d.mode))
    assert flashinfer_apply.serving([d, on_gpu]) == [on_gpu]


def test_an_undecided_call_on_a_gpu_runs_flashinfers_own_kernel(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use FlashInfer's convention: a fused addition in place, the other results returned."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    called: list[str] = []

    def own(name: str) -> Any:
        def function(*given: torch.Tensor, eps: float = 0.0) -> torch.Tensor | None:
            called.append(name)
            assert eps == (1e-6 if "norm" in name else 0.0)
            return None if name == "fused_add_rmsnorm" else given[0] * 2

        return function

    decided = [small("rmsnorm", M=1, d=64), small("add_rmsnorm", M=1, d=64), small("swiglu", M=1, I=64)]
    served, left = flashinfer_apply.definitions(decided, 1e-6, own)
    assert not left
    x, w, two = (OnGpu.of(torch.ones(shape)) for shape in ((3, 64), (64,), (3, 128)))
    plain = (t.as_subclass(torch.Tensor) for t in (x, w, two))
    assert served["rmsnorm_h64"](hidden_states=x, weight=w)[0, 0] == 2
    assert served["fused_add_rmsnorm_h64"](hidden_states=x, residual=x, weight=w) == (x, x)
    assert served["silu_and_mul_h128"](input=two)[0, 0] == 2
    assert called == ["rmsnorm", "fused_add_rmsnorm", "silu_and_mul"]
    x, w, two = plain
    assert served["rmsnorm_h64"](hidden_states=x, weight=w).shape == (3, 64)
    assert served["silu_and_mul_h128"](input=two).shape == (3, 64)
    assert len(called) == 3, "FlashInfer's kernel must not run on a CPU"
