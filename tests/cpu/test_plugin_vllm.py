"""autosel's plug-in inside the real vLLM: registered, idempotent, serving what was decided; on the CPU, no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autosel import ops, settings
from autosel.candidates import registry
from autosel.native.compile import find_compiler
from tests import engines
from tests.cpu.serving import serve

pytestmark = [
    pytest.mark.skipif(bool(engines.missing("vllm")), reason=engines.missing("vllm")),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]

PAGED = next(c.name for c in registry.all_candidates("paged_attn") if c.name.startswith("cpp:"))
# One process, since starting vLLM takes seconds: what it prints is what the tests read.
SCRIPT = """
import json, torch, types
import os
from autosel import dispatch
torch.set_grad_enabled(False)
dispatch.use(os.environ["DECIDED"]).__enter__()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.plugins import load_general_plugins
from autosel.integrations import engine_ops, vllm_plugin
import autosel
said = {}
vllm_plugin.register(); vllm_plugin.register()
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.attention.backends.registry import AttentionBackendEnum
said["oot"] = {name: cls.__name__ for name, cls in op_registry_oot.items()}
said["flags"] = sorted(cls.name for cls in op_registry_oot.values())
backend = AttentionBackendEnum["CUSTOM"].get_class()
said["backend"] = [backend.__module__, backend.get_name(), backend.get_impl_cls().__name__]
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.activation import SiluAndMul
torch.manual_seed(1)
with set_current_vllm_config(VllmConfig()):
    norm, other, act = RMSNorm(64), RMSNorm(96), SiluAndMul()
def close(a, b):
    return bool(torch.allclose(a, b, rtol=1e-5, atol=1e-5))
def reference(x, w, eps=1e-6):
    return (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * w.double()).float()
norm.weight.data.normal_(); other.weight.data.normal_()
x, r = torch.randn(2, 64), torch.randn(2, 64)
y = norm.forward_cpu(x)
z, added = norm.forward_cpu(x.clone(), r.clone())
said["norm"] = [type(norm).__name__, close(y, reference(x, norm.weight)), close(added, x + r),
                close(z, reference(x + r, norm.weight))]
said["own"] = close(other.forward_cpu(torch.ones(2, 96)), reference(torch.ones(2, 96), other.weight))
g = torch.randn(2, 128)
said["act"] = close(act.forward_cpu(g), torch.nn.functional.silu(g[:, :64]) * g[:, 64:])
# decode over vLLM's cache layout
impl = object.__new__(backend.get_impl_cls())
impl.__dict__.update(num_heads=4, head_size=16, scale=0.25, sliding_window=(-1, -1), logits_soft_cap=0,
    attn_type="decoder", kv_cache_dtype="auto", alibi_slopes=None, sinks=None, chunk_lookback=-1)
cache = torch.randn(8, 2, 16, 32)
lengths, table = torch.tensor([20, 33], dtype=torch.int32), torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
meta = types.SimpleNamespace(max_query_len=1, num_actual_tokens=2, seq_lens=lengths, block_table=table, max_seq_len=33,
    mm_prefix_range=None, rswa_prefix_lens=None)
q, out = torch.randn(2, 4, 16), torch.zeros(2, 4, 16)
said["decode"] = impl._decode(q, cache, meta, out)
right = True
for b, n in enumerate(lengths.tolist()):
    kv = cache[table[b].long()].permute(0, 2, 1, 3).reshape(-1, 2, 32)[:n].repeat_interleave(2, 1).double()
    s = torch.einsum("hd,nhd->hn", q[b].double(), kv[..., :16]) * 0.25
    right &= close(out[b], torch.einsum("hn,nhd->hd", s.softmax(-1), kv[..., 16:]).float())
said["attended"] = right
meta.max_query_len = 2
said["prompt"] = impl._decode(q, cache, meta, out)
said["uses"] = sorted({u.op for u in autosel.uses() if u.calls and u.candidate.startswith("cpp:")})
from vllm.model_executor.layers.quantization.utils import fp8_utils
said["tiles"] = fp8_utils.get_w8a8_block_fp8_configs(256, 384, 128, 128)
said["none"] = fp8_utils.get_w8a8_block_fp8_configs(128, 384, 128, 128)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    home, files = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("files")
    shapes = (
        ("rmsnorm", "cpp:rmsnorm", {"M": 2, "d": 64}),
        ("add_rmsnorm", "cpp:add_rmsnorm", {"M": 2, "d": 64}),
        ("swiglu", "cpp:swiglu", {"M": 2, "I": 64}),
        ("paged_attn", PAGED, {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 16, "L": 33, "page": 16}),
    )
    serve(home, [(ops.find(op).workload("fp32", dims), name) for op, name, dims in shapes])
    path = files / "gemm/configs/N=256,K=384,device_name=cpu,dtype=fp8_w8a8,block_shape=[128,128].json"
    path.parent.mkdir(parents=True)
    path.write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    environment = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    environment |= {
        "PYTHONPATH": engines.paths("vllm"),
        "VLLM_TARGET_DEVICE": "cpu",
        "AUTOSEL_HOME": str(settings.home()),
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"AUTOSEL_ENGINE_FILES": str(files), "DECIDED": str(home)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_each_op_is_registered_once_under_the_flag_vllm_knows(said: dict[str, object]) -> None:
    assert said["oot"] == {name: f"Autosel{name}" for name in ("RMSNorm", "GemmaRMSNorm", "SiluAndMul", "GeluAndMul")}
    assert said["flags"] == ["gelu_and_mul", "gemma_rms_norm", "rms_norm", "silu_and_mul"]
    assert said["backend"] == ["autosel.integrations.vllm_attention", "CUSTOM", "AutoselAttentionImpl"]


def test_vllms_modules_run_what_was_decided_and_are_right(said: dict[str, object]) -> None:
    assert said["norm"] == ["AutoselRMSNorm", True, True, True] and said["act"] is True
    assert said["own"] is True  # a width nobody decided: vLLM's own
    assert said["uses"] == ["add_rmsnorm", "paged_attn", "rmsnorm", "swiglu"]


def test_decode_reads_vllms_cache_and_prompts_are_left_to_vllm(said: dict[str, object]) -> None:
    assert said["decode"] is True and said["attended"] is True and said["prompt"] is False


def test_tiles_of_the_exported_folder_come_before_vllms_own(said: dict[str, object]) -> None:
    assert said["tiles"] == {"1": {"BLOCK_SIZE_M": 16}} and said["none"] is None


def test_the_entry_points_name_what_exists() -> None:
    found = tomllib.loads((engines.ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, module in (("vllm.general_plugins", "vllm_plugin"), ("sglang.srt.plugins", "sglang_plugin")):
        assert found[group]["autosel"] == f"autosel.integrations.{module}:register"
        assert (Path(engines.ROOT) / f"autosel/integrations/{module}.py").is_file()
