"""autosel's plug-in inside the real SGLang, through its own hooks: idempotent, right, and serving what was decided."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from autosel import ops, settings
from autosel.native.compile import find_compiler
from tests import engines
from tests.cpu.serving import serve

pytestmark = [
    pytest.mark.skipif(bool(engines.missing("sglang")), reason=engines.missing("sglang")),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]

SCRIPT = """
import json, torch, types
import os
from autosel import dispatch
torch.set_grad_enabled(False)
dispatch.use(os.environ["DECIDED"]).__enter__()
import autosel
from autosel.integrations import sglang_plugin
from sglang.srt.plugins.hook_registry import HookRegistry
sglang_plugin.register(); sglang_plugin.register()
said = {"hooks": {target: len(hooks) for target, hooks in HookRegistry._hooks.items() if hooks}}
HookRegistry.apply_hooks()
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.activation import SiluAndMul
from sglang.kernels.ops.gemm import fp8_kernel
torch.manual_seed(1)
norm, act = object.__new__(RMSNorm), object.__new__(SiluAndMul)
for module in (norm, act):
    torch.nn.Module.__init__(module)
norm.weight, norm.variance_epsilon, norm.variance_size_override = torch.nn.Parameter(torch.randn(64)), 1e-6, None
def close(a, b):
    return bool(torch.allclose(a, b, rtol=1e-5, atol=1e-5))
def reference(x):
    return (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()).float()
x, r, g = torch.randn(2, 64), torch.randn(2, 64), torch.randn(2, 128)
z, added = norm.forward_cuda(x, r)
said["right"] = [close(norm.forward_cuda(x), reference(x)), close(z, reference(x + r)), close(added, x + r),
                 close(act.forward_cuda(g), torch.nn.functional.silu(g[:, :64]) * g[:, 64:])]
said["uses"] = sorted({u.op for u in autosel.uses() if u.calls and u.candidate.startswith("cpp:")})
fp8_kernel.get_device_name = lambda: "x"
said["tiles"] = fp8_kernel.get_w8a8_block_fp8_configs(256, 384, 128, 128)
said["none"] = fp8_kernel.get_w8a8_block_fp8_configs(128, 384, 128, 128)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    home, files = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("files")
    shapes = (
        ("rmsnorm", "cpp:rmsnorm", {"M": 2, "d": 64}),
        ("add_rmsnorm", "cpp:add_rmsnorm", {"M": 2, "d": 64}),
        ("swiglu", "cpp:swiglu", {"M": 2, "I": 64}),
    )
    serve(home, [(ops.find(op).workload("fp32", dims), name) for op, name, dims in shapes])
    path = files / "gemm/configs/N=256,K=384,device_name=None,dtype=fp8_w8a8,block_shape=[128, 128].json"
    path.parent.mkdir(parents=True)
    path.write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    environment = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    environment |= {"PYTHONPATH": engines.paths("sglang"), "AUTOSEL_HOME": str(settings.home())}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"AUTOSEL_ENGINE_FILES": str(files), "DECIDED": str(home)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_each_hook_is_registered_once(said: dict[str, object]) -> None:
    hooks = said["hooks"]
    assert isinstance(hooks, dict) and set(hooks.values()) == {1}
    assert {name.rsplit(".", 2)[1] for name in hooks} >= {"RMSNorm", "GemmaRMSNorm", "SiluAndMul", "GeluAndMul"}


def test_sglangs_modules_run_what_was_decided_and_are_right(said: dict[str, object]) -> None:
    assert said["right"] == [True] * 4 and said["uses"] == ["add_rmsnorm", "rmsnorm", "swiglu"]


def test_tiles_of_the_exported_folder_come_before_sglangs_own(said: dict[str, object]) -> None:
    assert said["tiles"] == {"1": {"BLOCK_SIZE_M": 16}} and said["none"] is None
