"""Test trials of libraries, SDPA's kernels and torch.compile in a child with a timeout: every outcome is an answer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autosel.candidates import inductor, probe
from autosel.candidates.libraries import base, sdpa
from autosel.candidates.libraries.base import Library
from autosel.fingerprint import known
from autosel.ops import OPS
from autosel.values import Rejected

pytestmark = pytest.mark.usefixtures("preforked", "home")

CPU = replace(known.load("h200"), kind="cpu", identity={"cpus": 2})
ATTN = OPS["attn"].workload("bf16", {"B": 1, "Hq": 8, "Hkv": 8, "S": 1, "D": 64, "L": 512})
SDPA, COMPILED = f"{sdpa.__name__}:called", f"{inductor.__name__}:called"
# Code that replaces a part of PyTorch before the child's first line, as sitecustomize.
WHAT = {"sdpa": "import torch.nn.functional as it\nit.scaled_dot_product_attention = planted\n",
        "compile": "import torch as it\nit.compile = planted\n"}  # fmt: skip
HOW = {
    "hangs": ("while True: pass", "took longer than"),
    "dies": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the probe's process ended: SIGSEGV"),
    "exits": ("import os; os._exit(3)", "the probe's process ended"),
    "raises": ("raise RuntimeError('no such kernel')", "RuntimeError: no such kernel"),
}


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, body: str) -> None:
    (folder / "sitecustomize.py").write_text(f"def planted(*args, **kw):\n    {body}\n{WHAT[what]}")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("how", HOW)
def test_failures_of_the_child_become_reasons(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, reason = HOW[how]
    planted(tmp_path, monkeypatch, "sdpa", body)
    assert reason in probe.fault(SDPA, "flash", "cpu", "", deadline_s=2.0 if how == "hangs" else 60.0)


@pytest.mark.parametrize(
    ("what", "body", "reason"),
    [
        ("sdpa", "return args[0] * 0", "a small call has an error of"),
        ("compile", "return lambda x: x", "gives a different result than eager PyTorch"),
    ],
)
def test_a_wrong_result_is_a_reason(
    what: str, body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(tmp_path, monkeypatch, what, body)
    asked = (SDPA, "flash", "cpu", "") if what == "sdpa" else (COMPILED, "cpu", "")
    assert reason in probe.fault(*asked)


def test_a_kernel_of_pytorch_for_this_device_works_and_another_does_not() -> None:
    """Try PyTorch's flash kernel, which a CPU has, and cuDNN's, which it does not have."""
    assert sdpa.unusable("flash", CPU) == ""
    assert "PyTorch's cudnn kernel does not run here: RuntimeError" in sdpa.unusable("cudnn", CPU)


def test_a_kernel_for_a_device_that_is_not_there_is_rejected() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    flash = next(k for k in sdpa.KERNELS if k.op == "attn" and k.what == "flash")
    found = flash.supports(ATTN, known.load("h200"))
    assert isinstance(found, Rejected) and "no GPU of compute capability 9.0" in found.reason


# PyTorch's package represents a library: it is installed, and has a version.
TORCH = Library(distribution="torch", module="json", least_version=(1, 0), needs=("dumps",))


@pytest.mark.parametrize(
    ("text", "deadline_s", "reason"),
    [("import os\nos.abort()", 60.0, "process ended: SIGABRT"), ("while True: pass", 1.0, "took longer than 1 s")],
)
def test_an_import_that_ends_its_process_or_never_ends_is_a_rejection(
    text: str, deadline_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    said = base.unimportable(replace(TORCH, module="broken", needs=()), "1", deadline_s=deadline_s)
    assert said.startswith("torch cannot be imported: ") and said.endswith(reason)


def test_a_version_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the answer, so that another process does not try again."""
    gone = replace(TORCH, module="no_such_module")
    first = base.unimportable(gone, "1")
    probe._KNOWN.clear()
    monkeypatch.setattr(probe, "_tried", None)
    assert base.unimportable(gone, "1") == first
