"""Load and use the exported kernel package with Hugging Face's `kernels` library, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosel import fingerprint, ops, settings
from autosel.errors import UsageError
from autosel.integrations.engines import ask, hf_kernels
from autosel.native.compile import find_compiler
from autosel.testing.serving import pinned, serve
from tests import engines
from tests.cpu.engine_scene import last_line

pytestmark = [
    pytest.mark.skipif(bool(engines.missing("kernels")), reason=engines.missing("kernels")),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]

SCRIPT = """
import json, sys, torch
torch.set_grad_enabled(False)
import autosel
from autosel.integrations.engines import hf_kernels
from kernels import Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

@use_kernel_forward_from_hub("RMSNorm")
class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(64)), 1e-6
    def forward(self, hidden_states):
        return hidden_states.double().mul(torch.rsqrt(hidden_states.double().square().mean(-1, keepdim=True) + 1e-6)
            ).mul(self.weight.double()).float()

model = torch.nn.Sequential(Norm())
x = torch.randn(1, 2, 64)
want = model(x)
with use_kernel_mapping(hf_kernels.mapping(sys.argv[1]), inherit_mapping=False):
    model = kernelize(model, mode=Mode.INFERENCE, device="cpu")
got = model(x)
print(json.dumps([bool(torch.allclose(got, want, rtol=1e-5, atol=1e-5)), [u.candidate for u in autosel.uses()]]))
"""


def test_the_kernels_library_loads_the_package_and_runs_the_decided_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", engines.paths("kernels"))
    w = ops.find("rmsnorm").workload("fp32", {"M": 2, "d": 64})
    made = hf_kernels.export(fingerprint.take("cpu"), [pinned(w, "cpp:rmsnorm", 7)], tmp_path / "package")
    assert [(r.key, r.source, r.decision) for r in made.rows] == [
        ("RMSNorm", "measured", 7),
        ("SiLUAndMul", "default", None),
    ]
    heard = ask.ask("hf-kernels", tmp_path / "package", made)
    assert heard.version == hf_kernels.VERSION and heard.there == 2
    home = serve(tmp_path / "home", [(w, "cpp:rmsnorm")])
    (home / "native").symlink_to(settings.home() / "native")
    assert last_line(SCRIPT, {"AUTOSEL_HOME": str(home)}, str(tmp_path / "package")) == [True, ["cpp:rmsnorm"]]


def test_a_package_that_kernels_cannot_read_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", engines.paths("kernels"))
    w = ops.find("rmsnorm").workload("fp32", {"M": 2, "d": 64})
    made = hf_kernels.export(fingerprint.take("cpu"), [pinned(w, "cpp:rmsnorm")], tmp_path)
    (tmp_path / "build/torch-cpu/metadata.json").write_text("{}")
    heard = ask.ask("hf-kernels", tmp_path, made)
    assert [row.there for row in heard.rows] == [False, True] and "metadata" in heard.rows[0].why


def test_without_a_decision_no_package_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to export"):
        hf_kernels.export(fingerprint.take("cpu"), [], tmp_path / "package")
    assert not (tmp_path / "package").exists()
