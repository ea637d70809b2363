"""Test `race --candidate FILE`: a kernel author's source, proven and timed, and the messages if that is impossible."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import settings
from autosel.candidates import registry
from autosel.candidates.base import Candidate
from autosel.candidates.user_source import UserSource, from_source, resources_in
from autosel.cli import race as race_verb
from autosel.cli.main import run
from autosel.dispatch.board import this_device
from autosel.errors import AutoselError, BadConfig, UsageError
from autosel.formats import PLAIN
from autosel.models.workloads import Named
from autosel.native import cuda
from autosel.native.compile import find_compiler
from autosel.tuning.trial import Tried
from autosel.values import Effect, NativeRecipe, Passed, Rejected, Verdict, Workload
from tests.null.test_cli_headline import timing

pytestmark = pytest.mark.usefixtures("preforked")

KERNEL = """
#include <cmath>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
using tvm::ffi::TensorView;
static void mine(TensorView x, TensorView weight, double eps, double offset, TensorView y) {
  for (int64_t m = 0; m < x.size(0); ++m) {
    const float* row = static_cast<const float*>(x.data_ptr()) + m * x.stride(0);
    const float* w = static_cast<const float*>(weight.data_ptr());
    float* out = static_cast<float*>(y.data_ptr()) + m * y.stride(0);
    int64_t d = x.size(1);
    double sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += double(row[i]) * row[i];
    float r = float(1.0 / std::sqrt(sum / double(d) + eps));
    for (int64_t i = 0; i < d; ++i) out[i] = row[i] * r * (w[i] + float(offset))WRONG;
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mine, mine);
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    settings.read.cache_clear()


def race(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["race", "rmsnorm", "--shape", "M1.d64", "--dtype", "fp32", "--seed", "1", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_source_file_is_proven_and_its_mistake_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.cpp").write_text(KERNEL.replace("WRONG", " * 1.001f"))
    code, out, err = race(capsys, "--candidate", "wrong.cpp")
    assert code == 4, out + err
    assert "failed parity" in out and "--candidate wrong.cpp" in err
    case = err.partition('--case "')[2].partition('"')[0]
    (tmp_path / "wrong.cpp").write_text(KERNEL.replace("WRONG", ""))
    code, out, err = race(capsys, "--candidate", "wrong.cpp", "--case", case)
    assert code == 0, "the corrected kernel failed the case"
    (tmp_path / "wrong.cpp").write_text(KERNEL.replace("WRONG", " +"))
    code, _, err = race(capsys, "--candidate", "wrong.cpp", "--case", case)
    assert code == 1 and "does not compile" in err


def test_a_file_that_exports_no_function_or_several_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text(KERNEL)
    made = registry.named("rmsnorm", "one.cpp")
    assert isinstance(made, UserSource) and made.entry == "mine" and made.name == "user:one.cpp"
    w = Workload(op="rmsnorm", dims=(("M", 1), ("d", 64)), dtype="bf16")
    recipe = made.recipe(w, this_device(), made.knobs(w, this_device()))
    assert isinstance(recipe, NativeRecipe)
    assert recipe.source == str(tmp_path / "one.cpp") and "-DAUTOSEL_BF16" in recipe.flags
    (tmp_path / "two.cpp").write_text(KERNEL + KERNEL.replace("mine", "other"))
    assert from_source("two.cpp:other", "rmsnorm").entry == "other"
    with pytest.raises(UsageError, match="several functions"):
        from_source("two.cpp", "rmsnorm")
    with pytest.raises(UsageError, match="exports no third"):
        from_source("two.cpp:third", "rmsnorm")
    (tmp_path / "none.cpp").write_text("int main() {}")
    with pytest.raises(UsageError, match="exports no function"):
        from_source("none.cpp", "rmsnorm")
    with pytest.raises(BadConfig, match="cannot read"):
        from_source("absent.cu", "rmsnorm")


def test_a_cuda_source_is_not_eligible_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(KERNEL)
    w = Workload(op="rmsnorm", dims=(("M", 1), ("d", 64)), dtype="fp32")
    said = from_source("k.cu", "rmsnorm").supports(w, this_device())
    assert isinstance(said, Rejected) and "a CUDA source" in said.reason


def test_a_device_to_compile_for_is_for_cuda_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.cpp").write_text(KERNEL)
    code, _, err = race(capsys, "--candidate", "one.cpp", "--fingerprint", "h200")
    assert code == 2 and "needs a CUDA source" in err
    if not torch.cuda.is_available():
        (tmp_path / "one.cu").write_text(KERNEL)
        code, _, err = race(capsys, "--candidate", "one.cu", "--fingerprint", "h2000")
        assert code == 2 and "h200" in err


def test_a_python_file_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("def norm(x, weight, eps, offset):\n    return x\n")
    made = registry.named("rmsnorm", "sub/mine.py:norm")
    assert made.name == "user:norm"
    assert race_verb.sources(made) == (tmp_path / "sub" / "mine.py",)


def test_a_shape_is_given_by_the_ops_own_dimensions(capsys: pytest.CaptureFixture[str]) -> None:
    (w,) = [n.workload for n in race_verb._shaped("attn", ["B1.Hq4.Hkv2.S1.D64.L128"], "bf16", PLAIN)]
    assert w.key == "attn/B1.Hq4.Hkv2.S1.D64.L128/bf16"
    for wrong in ("M1", "M1.d64.x3", "d64,M1", "M.d64", "M1.d64.M2"):
        with pytest.raises(UsageError, match="--shape"):
            race_verb._shaped("rmsnorm", [wrong], "bf16", PLAIN)


class Editor:
    """Replace the watcher's sleep: at each check do one step of an editor, and press Ctrl-C after the last."""

    def __init__(self, file: Path, steps: Sequence[str]) -> None:
        self.file, self.steps, self.saves = file, iter(steps), 0

    def __call__(self, _: float) -> None:
        step = next(self.steps, None)
        if step is None:
            raise KeyboardInterrupt
        if step == "away":
            self.file.unlink()
        elif step != "look":
            self.saves += 1
            beside = self.file.with_name("saved~")
            beside.write_text(step)
            os.utime(beside, ns=(self.saves, self.saves))
            beside.replace(self.file)


def watch(monkeypatch: pytest.MonkeyPatch, editor: Editor, candidate: Candidate) -> list[str]:
    """Return the texts of the file that were raced."""
    raced: list[str] = []

    def once() -> AutoselError | None:
        raced.append(editor.file.read_text())
        registry.named("rmsnorm", f"{editor.file.name}:norm" if editor.file.suffix == ".py" else editor.file.name)
        return None

    monkeypatch.setattr(time, "sleep", editor)
    with pytest.raises(KeyboardInterrupt):
        race_verb.keep_racing(lambda: race_verb.sources(candidate), once)
    return raced


PYTHON = "def norm(x, weight, eps, offset):\n    return x\n"


def test_watching_races_after_each_save_and_survives_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel.cpp"
    file.write_text(KERNEL)
    made = registry.named("rmsnorm", "kernel.cpp")
    saved = [KERNEL + "\n", "// nothing is exported", KERNEL]
    steps = ["look", saved[0], "look", "look", "away", "look", "look", saved[1], "look", saved[2], "look", "look"]
    assert watch(monkeypatch, Editor(file, steps), made) == [KERNEL, *saved]
    assert "exports no function" in capsys.readouterr().err


def test_a_syntax_error_is_reported_and_the_next_save_is_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(PYTHON)
    made = registry.named("rmsnorm", "kernel.py:norm")
    saved = ["def norm(x:\n", PYTHON.replace("norm", "other"), PYTHON + "\n"]
    steps = ["look", saved[0], "look", saved[1], "look", saved[2], "look"]
    assert watch(monkeypatch, Editor(file, steps), made) == [PYTHON, *saved]
    said = capsys.readouterr().err
    assert "is not Python" in said and "other" in said and said.count("waiting for the next save") == 4


def test_a_save_in_two_steps_is_raced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(PYTHON)
    made = registry.named("rmsnorm", "kernel.py:norm")
    steps = ["look", "", PYTHON[:20], PYTHON * 2, "look", "look"]
    assert watch(monkeypatch, Editor(file, steps), made) == [PYTHON, PYTHON * 2]


def test_included_and_imported_files_are_watched_too(tmp_path: Path) -> None:
    for name in ("one.cc", "tile.hpp", "mine.py", "help.py", "notes.txt"):
        (tmp_path / name).write_text(KERNEL if name == "one.cc" else PYTHON)
    watched = race_verb.sources(registry.named("rmsnorm", "one.cc"))
    assert [p.name for p in watched] == ["one.cc", "tile.hpp"]
    watched = race_verb.sources(registry.named("rmsnorm", "mine.py:norm"))
    assert [p.name for p in watched] == ["help.py", "mine.py"]


CUDA = """
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
using tvm::ffi::TensorView;
__global__ void copy(const float* x, float* y, int n) {
  __shared__ float tile[256];
  int i = blockIdx.x * 256 + threadIdx.x;
  tile[threadIdx.x] = i < n ? x[i] : 0.f;
  __syncthreads();
  if (i < n) y[i] = tile[threadIdx.x ^ 1]BROKEN;
}
static void mine(TensorView x, TensorView weight, double eps, double offset, TensorView y) {
  int n = int(x.numel());
  copy<<<(n + 255) / 256, 256>>>(static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()), n);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mine, mine);
"""


@pytest.mark.skipif(cuda.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_a_cuda_source_is_compiled_and_its_resources_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.cu").write_text(CUDA.replace("BROKEN", ""))
    code, out, err = race(capsys, "--candidate", "k.cu")
    assert code == 2 and "not run: this machine has no GPU" in err
    assert "compiled, not run" in out and "registers per thread, 0 bytes spilled, 1024 bytes of static shared" in out
    assert "NVIDIA H200" in out and "TB/s" in out
    code, out, _ = race(capsys, "--candidate", "k.cu", "--json")  # found compiled
    (found,) = json.loads(out)["races"]
    assert found["compiled_for"] == "NVIDIA H200" and "1024 bytes" in found["resources"] and found["floor_us"] > 0
    (tmp_path / "k.cu").write_text(CUDA.replace("BROKEN", " +"))
    code, _, err = race(capsys, "--candidate", "k.cu")
    assert code == 1 and "does not compile" in err and "expected an expression" in err


def test_the_output_of_ptxas_is_summarised() -> None:
    log = """
ptxas info    : 0 bytes gmem
ptxas info    : Function properties for k
    0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 4096 bytes smem, 400 bytes cmem[0]
ptxas info    : Used 32 registers, used 0 barriers, 380 bytes cmem[0]
"""
    assert resources_in(log) == "64 registers per thread, 28 bytes spilled, 4096 bytes of static shared memory"
    assert resources_in("warning: unused") == ""


def test_the_reason_for_a_loss_has_figures(capsys: pytest.CaptureFixture[str]) -> None:
    w = Workload(op="rmsnorm", dims=(("M", 1), ("d", 4096)), dtype="fp32")
    verdict = Verdict(
        outcome="lose",
        winner="torch:rmsnorm",
        reason="0.50x",
        effect=Effect(median=1.0, lo=1.0, hi=1.0),
        timings={"torch:rmsnorm": timing(2.0), "user:k.cpp": timing(4.0)},
        read_bytes_per_s=49_152 / 2e-6,
    )
    passed = Passed(cases=1, worst=0.1, worst_case="random")
    tried = Tried(named=Named(workload=w, label="rmsnorm", calls_per_step=1), parity=passed, verdict=verdict)
    told: Any = "\n".join(race_verb.explanation(tried, "user:k.cpp", "Used 8 registers"))
    assert "resources  8 registers" in told
    assert "user:k.cpp: 48 KiB in 4.00 us" in told and "50% of it" in told and "100% of it" in told
    assert "verdict    lose: 0.50x" in told
    assert json.dumps(told)
