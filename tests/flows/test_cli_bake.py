"""Test `export --bake`: a folder that serves decided kernels read-only, without a compiler, a home or a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from autosel.ledger import open_ledger, snapshot
from autosel.ops import find
from autosel.values import PythonRecipe
from tests.cpu.test_dispatch_board import ROOT, W, built, forget, home, native_arm, promote
from tests.null.test_dispatch import python_arm
from tests.verbs import verb

__all__ = ["built", "home"]  # fixtures

SERVE = """
import json, socket, sys, time
def refuse(*args):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
import torch
begun = time.perf_counter()
import autosel
from autosel.native.compile import find_compiler
x, weight = torch.randn(3, 256), torch.randn(256)
bound = autosel.best("rmsnorm", like=(x, weight))
made = bound(x, weight)
ready = time.perf_counter() - begun
reference = torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)
for _ in range(30):
    bound(x, weight)
print(json.dumps({"candidate": bound.candidate, "right": torch.allclose(made, reference, rtol=1e-5, atol=1e-5),
                  "compiler": find_compiler() is not None, "ready_s": ready, "calls": bound.calls()}))
"""


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Return every entry with its time of change, and the digest of its bytes."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        content = sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = path.stat().st_mtime_ns, content
    return found


def served_from(folder: Path, tmp_path: Path, **variables: str) -> dict[str, Any]:
    """Serve in a new process without write access, compiler and home."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "nothing").mkdir(exist_ok=True)
    environment = {"PATH": str(tmp_path / "nothing"), "HOME": "/proc/nowhere", "PYTHONPATH": str(ROOT)}
    environment |= {"AUTOSEL_HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    words = [sys.executable, "-c", SERVE]
    done = subprocess.run(words, env=environment, cwd=tmp_path / "nothing", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def frozen(folder: Path) -> dict[str, str]:
    return {"AUTOSEL_LOCK": str(folder / "autosel.lock"), "AUTOSEL_FROZEN": "1"}


@pytest.fixture
def baked(home: Path, tmp_path: Path) -> Path:
    promote(open_ledger(), native_arm())
    folder = tmp_path / "image" / "autosel"
    folder.parent.mkdir()
    told = verb("export", "--bake", str(folder), home=home)
    assert "1 decisions and 1 builds" in told and f"AUTOSEL_HOME={folder}" in told
    return folder


@pytest.mark.parametrize("locked", [False, True])
def test_a_baked_folder_serves_read_only_without_a_compiler_and_is_not_changed(
    baked: Path, home: Path, tmp_path: Path, record_property: Callable[[str, object], None], locked: bool
) -> None:
    home.rename(tmp_path / "gone")  # no file of the original home is read
    before = tree(baked)
    found = served_from(baked, tmp_path, **(frozen(baked) if locked else {}))
    assert (found["candidate"], found["right"], found["compiler"]) == ("cpp:rmsnorm", True, False)
    assert found["calls"] == 31 and tree(baked) == before
    record_property("ready_s", found["ready_s"])  # time after `import torch`, for the report of --junitxml


def test_a_build_that_is_missing_from_the_folder_is_refused_under_the_lock(baked: Path, tmp_path: Path) -> None:
    for artefact in (baked / "native").rglob("kernel.so"):
        artefact.unlink()
    assert served_from(baked, tmp_path)["candidate"] == "torch:rmsnorm"
    with pytest.raises(AssertionError, match="cannot be served here"):
        served_from(baked, tmp_path, **frozen(baked))


def test_what_a_folder_cannot_serve_is_left_out_with_the_reason(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def norm(x, weight, eps, offset, out=None):\n    return x\n")
    mine = python_arm("user:norm", PythonRecipe(target="mine:norm", path=str(tmp_path)))
    other = W.at(d=512)
    ledger = open_ledger()
    promote(ledger, native_arm())
    promote(ledger, mine, other, idempotency_key="two")
    told = verb("export", "--bake", str(tmp_path / "made"), home=home)
    assert "left out: " in told and f"user:norm is in {tmp_path}: install it" in " ".join(told.split())
    found = snapshot.read(tmp_path / "made" / snapshot.FILE)
    assert found is not None and [row.decision.arm.candidate for row in found.rows] == ["cpp:rmsnorm"]


def test_an_export_to_an_engine_on_a_cpu_is_a_home_with_what_its_plug_in_serves(home: Path, tmp_path: Path) -> None:
    ledger = open_ledger()
    promote(ledger, native_arm())
    head = find("lm_head").workload("fp32", {"M": 1, "V": 64, "d": 64})
    eager = python_arm("user:lm_head", PythonRecipe(target="autosel.ops.eager:lm_head"))
    promote(ledger, eager, head, idempotency_key="two")
    told = verb("export", "--to", "vllm", str(tmp_path / "made"), home=home)
    assert "vllm on a CPU: 1 decisions and 1 builds" in told and f"AUTOSEL_HOME={tmp_path / 'made'}" in told
    found = snapshot.read(tmp_path / "made" / snapshot.FILE)
    assert found is not None and [row.document["op"] for row in found.rows] == ["rmsnorm"]


def test_a_folder_with_files_and_a_home_without_decisions_are_refused(home: Path, tmp_path: Path) -> None:
    assert "nothing can be baked" in verb("export", "--bake", str(tmp_path / "made"), home=home, codes=(1,))
    forget()
    promote(open_ledger(), native_arm())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "is not empty" in verb("export", "--bake", str(tmp_path / "full"), home=home, codes=(1, 2))
    assert os.listdir(tmp_path / "full") == ["a"]
