"""SDPA's kernels and torch.compile are tried in a child with a deadline: whatever happens there is an answer here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autosel import settings
from autosel.candidates import inductor, probe
from autosel.candidates.libraries import sdpa
from autosel.fingerprint import known
from autosel.native.compile import find_compiler
from autosel.ops import OPS
from autosel.values import Accepted, Rejected

CPU = replace(known.load("h200"), kind="cpu", identity={"cpus": 2})
ATTN = OPS["attn"].workload("bf16", {"B": 1, "Hq": 8, "Hkv": 8, "S": 1, "D": 64, "L": 512})
NORM = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 512})
SDPA, COMPILED = f"{sdpa.__name__}:called", f"{inductor.__name__}:called"
# What is planted in PyTorch before the child's first line: as sitecustomize, in place of what is tried.
WHAT = {"sdpa": "import torch.nn.functional as it\nit.scaled_dot_product_attention = planted\n",
        "compile": "import torch as it\nit.compile = planted\n"}  # fmt: skip
HOW = {
    "hangs": ("while True: pass", "took longer than"),
    "dies": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended: SIGSEGV"),
    "exits": ("import os; os._exit(3)", "its process ended"),
    "raises": ("raise RuntimeError('no such kernel')", "RuntimeError: no such kernel"),
}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))
    settings.read.cache_clear()


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, body: str) -> None:
    (folder / "sitecustomize.py").write_text(f"def planted(*args, **kw):\n    {body}\n{WHAT[what]}")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", WHAT)
def test_what_goes_wrong_in_the_child_is_a_reason_here(
    what: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, reason = HOW[how]
    planted(tmp_path, monkeypatch, what, body)
    asked = (SDPA, "flash", "cpu", "") if what == "sdpa" else (COMPILED, "cpu", "")
    assert reason in probe.fault(*asked, deadline_s=2.0 if how == "hangs" else 60.0)


def test_what_fails_where_torch_cannot_be_imported_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    broken = tmp_path / "torch" / "__init__.py"
    broken.write_text('raise ImportError("libtorch.so: cannot open shared object file")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "libtorch.so" in probe.fault(SDPA, "flash", "cpu", "")
    broken.unlink()
    broken.parent.rename(tmp_path / "mended")
    assert probe.fault(SDPA, "flash", "cpu", "") == ""


@pytest.mark.parametrize(
    ("what", "body", "reason"),
    [
        ("sdpa", "return args[0] * 0", "a small call is off by"),
        ("compile", "return lambda x: x", "gives another result than eager"),
    ],
)
def test_a_wrong_result_is_a_reason(
    what: str, body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(tmp_path, monkeypatch, what, body)
    asked = (SDPA, "flash", "cpu", "") if what == "sdpa" else (COMPILED, "cpu", "")
    assert reason in probe.fault(*asked)


def test_a_kernel_that_pytorch_has_here_is_found_to_work_and_another_not() -> None:
    """On a CPU PyTorch has a flash kernel, and none of cuDNN's."""
    assert sdpa.unusable("flash", CPU) == ""
    assert "PyTorch's cudnn kernel does not run here: RuntimeError" in sdpa.unusable("cudnn", CPU)


def test_a_kernel_for_a_device_that_is_not_there_is_rejected() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    flash = next(k for k in sdpa.KERNELS if k.op == "attn" and k.what == "flash")
    found = flash.supports(ATTN, known.load("h200"))
    assert isinstance(found, Rejected) and "no GPU of compute capability 9.0" in found.reason


def test_torch_compile_is_accepted_where_it_works_and_rejected_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    norm = next(c for c in inductor.INDUCTOR if c.op == "rmsnorm")
    assert norm.supports(NORM, CPU) == Accepted()
    planted(tmp_path, monkeypatch, "compile", HOW["raises"][0])
    probe.forget()
    assert norm.supports(NORM, CPU) == Accepted()  # what was found out is kept
    found = norm.supports(NORM, replace(CPU, identity={"cpus": 3}))
    assert isinstance(found, Rejected)
    assert found.reason == "torch.compile does not work here: RuntimeError: no such kernel"
