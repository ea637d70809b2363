"""Test autosel's plug-in in the real SGLang, through its hooks and registry: idempotent, right, and serving."""

from __future__ import annotations

import pytest

from autosel import ops
from autosel.candidates import registry
from autosel.native.compile import find_compiler
from tests import engines
from tests.cpu.engine_scene import NORMS, decided, entry_points, heard, installed

pytestmark = [
    pytest.mark.skipif(bool(engines.missing("sglang")), reason=engines.missing("sglang")),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]

PAGED = next(c.name for c in registry.all_candidates("paged_attn") if c.name.startswith("cpp:"))
SCRIPT = """
import types
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from autosel.integrations import sglang_plugin
load_plugins()
sglang_plugin.register()
said["hooks"] = {target: len(hooks) for target, hooks in HookRegistry._hooks.items() if hooks}
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.activation import SiluAndMul
from sglang.kernels.ops.gemm import fp8_kernel
norm, act = object.__new__(RMSNorm), object.__new__(SiluAndMul)
for module in (norm, act):
    torch.nn.Module.__init__(module)
norm.weight, norm.variance_epsilon, norm.variance_size_override = torch.nn.Parameter(torch.randn(64)), 1e-6, None
x, r, g = torch.randn(2, 64), torch.randn(2, 64), torch.randn(2, 128)
z, added = norm.forward_cuda(x, r)
said["right"] = [close(norm.forward_cuda(x), reference(x, norm.weight)), close(z, reference(x + r, norm.weight)),
                 close(added, x + r), close(act.forward_cuda(g), torch.nn.functional.silu(g[:, :64]) * g[:, 64:])]
# One rounding for all batches, as SGLang's deterministic inference has it: SGLang's own.
from sglang.srt.batch_invariant_ops import batch_invariant_ops
norm.cast_x_before_out_mul, norm.fp32_residual, norm.override_orig_dtype, norm.hidden_size = False, False, None, 64
def asked():
    uses = [u for u in autosel.uses() if u.op in ("add_rmsnorm", "swiglu")]
    return [sum(u.calls for u in uses if own is (u.candidate == "engine:own")) for own in (False, True)]
before, batch_invariant_ops._batch_invariant_MODE = asked(), True
z, _ = norm.forward_cuda(x.clone(), r.clone())
said["invariant"] = [close(z, reference(x + r, norm.weight)), act.forward_cpu(g).shape == (2, 64),
                     [now - then for now, then in zip(asked(), before)]]
batch_invariant_ops._batch_invariant_MODE = False

# Attention: built by SGLang's registry, over its own pools and batches.
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
said["choices"] = ATTENTION_BACKEND_CHOICES.count("autosel")
rows, lengths = torch.tensor([2, 1]), [20, 33]
def calls():
    return sum(u.calls for u in autosel.uses() if u.op == "paged_attn" and u.candidate.startswith("cpp:"))
def scene(page, *, dtype=torch.float32):
    pool = MHATokenToKVPool(96, page, dtype, 2, 16, 1, "cpu", False)
    tokens = ReqToTokenPool(4, 64, "cpu", False)
    for row, pages in zip(rows, (torch.tensor([3, 1, 4]), torch.tensor([5, 2, 0]))):  # of 16 tokens
        tokens.req_to_token[row, :48] = (pages[:, None] * 16 + torch.arange(16)).flatten().int()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    runner = types.SimpleNamespace(device="cpu", use_mla_backend=False, req_to_token_pool=tokens, token_to_kv_pool=pool)
    return ATTENTION_BACKENDS["autosel"](runner), pool, tokens
def batch(tokens, mode=ForwardMode.DECODE, queries=(1, 1)):
    slots = torch.cat([tokens.req_to_token[r, n - c : n] for r, n, c in zip(rows, lengths, queries)])
    made = ForwardBatch(forward_mode=mode, batch_size=2, input_ids=torch.zeros(len(slots), dtype=torch.int64),
        req_pool_indices=rows, seq_lens=torch.tensor(lengths), out_cache_loc=slots.long(), seq_lens_sum=sum(lengths))
    made.seq_lens_cpu = torch.tensor(lengths)
    made.extend_seq_lens = torch.tensor(queries)
    made.extend_prefix_lens = torch.tensor(lengths) - made.extend_seq_lens
    return made
def run(backend, pool, tokens, layer, one, **named):
    n = len(one.out_cache_loc)
    q, k, v = torch.randn(n, 64), torch.randn(n, 2, 16), torch.randn(n, 2, 16)
    before = calls()
    out = backend.forward(q.to(pool.dtype), k.to(pool.dtype), v.to(pool.dtype), layer, one, **named)
    keys, values = (b[0].float()[tokens.req_to_token[rows, :48].long()] for b in (pool.k_buffer, pool.v_buffer))
    last = torch.tensor([0, n - 1]) if n == 2 else torch.tensor([2, 5])
    window = layer.sliding_window_size + 1
    wanted = attention(q.view(n, 4, 16)[last], keys, values, lengths, 0.25, window)
    return [close(out.view(n, 4, 16)[last].float(), wanted), calls() - before]
full, windowed = (RadixAttention(4, 16, 0.25, 2, 0, sliding_window_size=w) for w in (-1, 7))
for page in (1, 16):
    backend, pool, tokens = scene(page)
    said[f"page {page}"] = found = {}
    found["built"] = [c.__name__ for c in type(backend).__mro__[:3]]
    prompt, step = batch(tokens, ForwardMode.EXTEND, (3, 3)), batch(tokens)
    backend.init_forward_metadata(prompt)
    found["prompts"] = run(backend, pool, tokens, full, prompt)
    backend.init_forward_metadata(step)
    found["decode"], found["windowed"] = (run(backend, pool, tokens, layer, step) for layer in (full, windowed))
    found["another batch"] = run(backend, pool, tokens, full, batch(tokens))
    step.seq_lens_cpu = None  # as it is recorded in a graph: the longest is not known
    backend.init_forward_metadata_in_graph(step)
    found["in a graph"] = run(backend, pool, tokens, full, step)
backend, pool, tokens = scene(16)
backend.enable_deterministic, step = True, batch(tokens)
backend.init_forward_metadata(step)
said["deterministic"] = run(backend, pool, tokens, full, step)[1]
backend, pool, tokens = scene(16, dtype=torch.bfloat16)
step = batch(tokens)
backend.init_forward_metadata(step)
said["undecided"] = run(backend, pool, tokens, full, step)[1]
try:
    ATTENTION_BACKENDS["autosel"](types.SimpleNamespace(use_mla_backend=True))
except ValueError as error:
    said["mla"] = str(error)
said["uses"] = served()
fp8_kernel.get_device_name = lambda: "x"
said["tiles"] = fp8_kernel.get_w8a8_block_fp8_configs(256, 384, 128, 128)
said["none"] = fp8_kernel.get_w8a8_block_fp8_configs(128, 384, 128, 128)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("sglang")
    plug = installed(folder / "plug", {"sglang.srt.plugins": entry_points()["sglang.srt.plugins"]})
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 16}
    paged = [
        ops.find("paged_attn").workload("fp32", {**sizes, "L": length, "page": page}, window=window)
        for length, window in ((33, 0), (33, 8), (64, 0))
        for page in (1, 16)
    ]
    tiles = "N=256,K=384,device_name=None,dtype=fp8_w8a8,block_shape=[128, 128].json"
    chosen = [*decided(NORMS), *((w, PAGED) for w in paged)]
    return heard(folder, "sglang", SCRIPT, chosen, tiles=tiles, plug=plug)


def test_each_hook_and_the_backend_are_registered_once(said: dict[str, object]) -> None:
    hooks = said["hooks"]
    assert isinstance(hooks, dict) and set(hooks.values()) == {1}
    assert {name.rsplit(".", 2)[1] for name in hooks} >= {"RMSNorm", "GemmaRMSNorm", "SiluAndMul", "GeluAndMul"}
    assert said["choices"] == 1


def test_sglangs_modules_run_decided_kernels_with_right_results(said: dict[str, object]) -> None:
    assert said["right"] == [True] * 4 and said["uses"] == ["add_rmsnorm", "paged_attn", "rmsnorm", "swiglu"]


def test_deterministic_inference_runs_sglangs_kernels(said: dict[str, object]) -> None:
    assert said["invariant"] == [True, True, [0, 2]]  # counted as SGLang's
    assert said["deterministic"] == 0


@pytest.mark.parametrize("page", [1, 16])
def test_decode_steps_read_sglangs_cache_and_the_rest_is_left_to_sglang(said: dict[str, object], page: int) -> None:
    """Check for each step if it is right, and its number of decided calls."""
    found = said[f"page {page}"]
    assert isinstance(found, dict)
    assert found["built"] == ["AutoselAttnBackend", "DecodeSteps", "TorchNativeAttnBackend"]
    assert found["prompts"] == [True, 0]
    assert found["decode"] == found["windowed"] == found["in a graph"] == [True, 1]
    assert found["another batch"] == [True, 0]  # no tables were made for it


def test_undecided_steps_and_latent_attention_run_sglangs_kernels(said: dict[str, object]) -> None:
    assert said["undecided"] == 0
    assert "--attention-backend triton" in str(said["mla"])


def test_tiles_of_the_exported_folder_come_before_sglangs_own(said: dict[str, object]) -> None:
    assert said["tiles"] == {"1": {"BLOCK_SIZE_M": 16}} and said["none"] is None
