"""Test autosel's plug-in in the real vLLM, without a server: vLLM finds it, registers it once, and selects and runs it.

vLLM runs on this test's platform plug-in: its CPU platform, but with the requested attention backend instead of the
CPU's only one. vLLM's Triton kernels, which write its cache and run undecided attention, run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from autosel import ops
from autosel.candidates import registry
from autosel.native.compile import find_compiler
from tests import engines
from tests.cpu.engine_scene import NORMS, decided, entry_points, heard, installed

pytestmark = [
    pytest.mark.skipif(bool(engines.missing("vllm")), reason=engines.missing("vllm")),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (the `cross` extra)"),
]

PAGED = next(c.name for c in registry.all_candidates("paged_attn") if c.name.startswith("cpp:"))
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class Asked(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return selected_backend.get_path()

def platform():
    return "asked_platform.Asked"
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
# One process, because starting vLLM takes seconds: the tests read its notes.
SCRIPT = """
# Triton with a device that is none: kernels are interpreted. vLLM asks these two things of it.
import triton.backends
triton.backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)
torch.cuda.get_device_capability = lambda *device: (8, 0)

from vllm.plugins import load_general_plugins
load_general_plugins()
from autosel.integrations import vllm_plugin
vllm_plugin.register()
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.attention.backends.registry import AttentionBackendEnum
said["oot"] = {name: cls.__name__ for name, cls in op_registry_oot.items()}
said["flags"] = sorted(cls.name for cls in op_registry_oot.values())
config = VllmConfig(
    model_config=ModelConfig(model=".", skip_tokenizer_init=True, dtype="float32", max_model_len=256),
    cache_config=CacheConfig(block_size=16), attention_config=AttentionConfig(backend=AttentionBackendEnum.CUSTOM))
with set_current_vllm_config(config):
    norm, other, act = RMSNorm(64), RMSNorm(96), SiluAndMul()
    layers = {w: Attention(4, 32, 0.25, num_kv_heads=2, cache_config=config.cache_config, prefix=f"layers.{w}",
                           per_layer_sliding_window=w or None) for w in (0, 8)}
norm.weight.data.normal_(); other.weight.data.normal_()
x, r = torch.randn(2, 64), torch.randn(2, 64)
y = norm.forward_cpu(x)
z, added = norm.forward_cpu(x.clone(), r.clone())
said["norm"] = [type(norm).__name__, close(y, reference(x, norm.weight)), close(added, x + r),
                close(z, reference(x + r, norm.weight))]
said["own"] = close(other.forward_cpu(torch.ones(2, 96)), reference(torch.ones(2, 96), other.weight))
g = torch.randn(2, 128)
said["act"] = close(act.forward_cpu(g), torch.nn.functional.silu(g[:, :64]) * g[:, 64:])

# Steps of two sequences, with vLLM's metadata: prompts by vLLM's kernel, then one token each by what was decided.
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
table = torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
table = torch.nn.functional.pad(table, (0, 13))
def run(layer, queries, lengths, longest=0):
    kept = [(b, p) for b, (q, n) in enumerate(zip(queries, lengths)) for p in range(n - q, n)]
    slots = torch.tensor([int(table[b, p // 16]) * 16 + p % 16 for b, p in kept])
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    common = CommonAttentionMetadata(query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=2,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), num_actual_tokens=len(kept), max_query_len=max(queries),
        max_seq_len=longest or max(lengths), block_table_tensor=table, slot_mapping=slots)
    backend = layer.get_attn_backend()
    made = backend.get_builder_cls()(layer.get_kv_cache_spec(config), [layer.layer_name], config, torch.device("cpu"))
    q, kv = torch.randn(len(kept), 128), torch.randn(2, len(kept), 64)
    with set_forward_context({layer.layer_name: made.build(0, common)}, config, slot_mapping={layer.layer_name: slots}):
        out = layer(q, *kv)
    last = [sum(queries[: b + 1]) - 1 for b in (0, 1)]
    return q.view(-1, 4, 32)[last], out.view(-1, 4, 32)[last]
def right(layer, queries, lengths, window, longest=0):
    q, out = run(layer, queries, lengths, longest)
    keys, values = layer.kv_cache.transpose(1, 2)[table.long()].flatten(1, 2).split(32, dim=-1)
    return close(out, attention(q, keys, values, lengths, 0.25, window))
def calls():
    return sum(u.calls for u in autosel.uses() if u.op == "paged_attn" and u.candidate.startswith("cpp:"))
for window, layer in layers.items():
    layer.kv_cache = torch.zeros(8, 2, 16, 64)
    backend = layer.get_attn_backend()
    steps = [("prompts", [19, 32], [19, 32]), ("decode", [1, 1], [20, 33]), ("mixed", [1, 2], [21, 35])]
    said[f"window {window}"] = {"built": [backend.get_name(), type(layer.impl).__module__, type(layer.impl).__name__]}
    for name, queries, lengths in steps:
        before = calls()
        said[f"window {window}"][name] = [right(layer, queries, lengths, window), calls() - before]
# As in a capture, for the longest context, before which it was run; and as for those who want one rounding.
from autosel.integrations import engine_ops
own, engine_ops.captured = engine_ops.captured, lambda values: True
before = calls()
said["captured"] = [right(layers[0], [1, 1], [22, 36], 0, 256), calls() - before]
engine_ops.captured = own
from vllm import envs
envs.VLLM_BATCH_INVARIANT = True
before = calls()
said["invariant"] = [right(layers[0], [1, 1], [23, 37], 0), calls() - before, act.forward_cpu(g).shape == (2, 64)]
del envs.VLLM_BATCH_INVARIANT
said["profiling"] = layers[0].impl.forward(layers[0], *torch.zeros(3, 1, 4, 32), layers[0].kv_cache, None,
                                           torch.ones(1, 4, 32)).sum().item()
said["uses"] = served()
from vllm.model_executor.layers.quantization.utils import fp8_utils
said["tiles"] = fp8_utils.get_w8a8_block_fp8_configs(256, 384, 128, 128)
said["none"] = fp8_utils.get_w8a8_block_fp8_configs(128, 384, 128, 128)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    groups = {"vllm.platform_plugins": {"asked": "asked_platform:platform"}}
    plug = installed(folder / "plug", {**groups, "vllm.general_plugins": entry_points()["vllm.general_plugins"]})
    (plug / "asked_platform.py").write_text(PLATFORM)
    paged = {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 32, "L": 33, "page": 16}
    windowed = ops.find("paged_attn").workload("fp32", paged, window=8)
    chosen = [*decided([*NORMS, ("paged_attn", PAGED, paged), ("paged_attn", PAGED, paged | {"L": 256})])]
    unrounded = ops.find("add_rmsnorm").workload("fp32", {"M": 2, "d": 64}, sandwich=2)
    chosen += [(windowed, PAGED), (unrounded, "cpp:add_rmsnorm")]
    tiles = "N=256,K=384,device_name=cpu,dtype=fp8_w8a8,block_shape=[128,128].json"
    return heard(folder, "vllm", SCRIPT, chosen, tiles=tiles, plug=plug, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="0")


def test_each_op_is_registered_once_under_the_flag_vllm_knows(said: dict[str, object]) -> None:
    assert said["oot"] == {name: f"Autosel{name}" for name in ("RMSNorm", "GemmaRMSNorm", "SiluAndMul", "GeluAndMul")}
    assert said["flags"] == ["gelu_and_mul", "gemma_rms_norm", "rms_norm", "silu_and_mul"]


def test_vllms_modules_run_decided_kernels_with_right_results(said: dict[str, object]) -> None:
    assert said["norm"] == ["AutoselRMSNorm", True, True, True] and said["act"] is True
    assert said["own"] is True  # an undecided width: vLLM's own
    assert said["uses"] == ["add_rmsnorm", "paged_attn", "rmsnorm", "swiglu"]


@pytest.mark.parametrize("window", [0, 8])
def test_vllm_builds_our_attention_whose_decode_steps_run_decided_kernels(said: dict[str, object], window: int) -> None:
    """Check for each step if it is right, and its number of decided calls."""
    layer = said[f"window {window}"]
    assert isinstance(layer, dict)
    assert layer["built"] == ["CUSTOM", "autosel.integrations.vllm_attention", "AutoselAttentionImpl"]
    assert layer["prompts"] == [True, 0] and layer["mixed"] == [True, 0]  # vLLM's own kernel
    assert layer["decode"] == [True, 1]


def test_a_captured_step_runs_the_kernel_decided_for_the_longest_context(said: dict[str, object]) -> None:
    assert said["captured"] == [True, 1]


def test_with_batch_invariance_vllms_kernels_run(said: dict[str, object]) -> None:
    assert said["invariant"] == [True, 0, True]


def test_a_profiling_run_is_left_to_vllm(said: dict[str, object]) -> None:
    assert said["profiling"] == 0.0


def test_tiles_of_the_exported_folder_come_before_vllms_own(said: dict[str, object]) -> None:
    assert said["tiles"] == {"1": {"BLOCK_SIZE_M": 16}} and said["none"] is None


def test_the_entry_points_name_existing_functions() -> None:
    for group, module in (("vllm.general_plugins", "vllm_plugin"), ("sglang.srt.plugins", "sglang_plugin")):
        assert entry_points()[group]["autosel"] == f"autosel.integrations.{module}:register"
        assert (Path(engines.ROOT) / f"autosel/integrations/{module}.py").is_file()
