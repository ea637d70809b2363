"""Test libraries that may be installed: the reason for leaving one out is given, and the trial of a library never
crashes this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosel import settings
from autosel.candidates import probe
from autosel.candidates.arms import python_digest
from autosel.candidates.convention import parameters_of, takes_outputs
from autosel.candidates.libraries import (
    base,
    flash_attn,
    flashinfer,
    flashinfer_mm,
    flashinfer_paged,
    liger,
    quack,
    sdpa,
    sgl,
)
from autosel.candidates.libraries.base import Library, LibraryKernel, parsed
from autosel.fingerprint import known
from autosel.ops import OPS
from autosel.values import Accepted, PythonRecipe, Workload
from autosel.workers.process import Limits

MODULES = (flash_attn, flashinfer, flashinfer_mm, flashinfer_paged, liger, quack, sgl)
WRAPPED = [k for module in MODULES for k in module.KERNELS]
HEADS = {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 512}
ROPE = {"M": 2, "Hq": 8, "Hkv": 2, "D": 128, "R": 128}
LINEAR = {"M": 2, "N": 128, "K": 512}
DIMS = {
    "linear": LINEAR,
    "rmsnorm": {"M": 2, "d": 512},
    "add_rmsnorm": {"M": 2, "d": 512},
    "rope": ROPE,
    "swiglu": {"M": 2, "I": 512},
    "geglu": {"M": 2, "I": 512},
    "attn": HEADS,
    "paged_attn": {**HEADS, "page": 256},
}
PAGED = {**HEADS, "page": 64}


def workload(op: str) -> Workload:
    return OPS[op].workload("bf16", DIMS[op], **({"tanh": 1} if op == "geglu" else {}))


def of(module: Any, op: str, name: str = "") -> Any:
    return next(k for k in module.KERNELS if k.op == op and k.name.endswith(name))


@pytest.mark.parametrize("kernel", WRAPPED, ids=lambda k: k.name)
def test_an_absent_library_is_refused_by_name(kernel: LibraryKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel.library.version():
        pytest.skip(f"{kernel.library.distribution} is installed")
    monkeypatch.setattr(kernel, "limits", lambda w, cc: "")  # some of its routes are for other devices and pages
    assert kernel.why_not(workload(kernel.op), known.load("h200")) == f"{kernel.library.distribution} is not installed"


@pytest.mark.parametrize("kernel", WRAPPED, ids=lambda k: k.name)
def test_a_wrapper_can_be_called_as_its_op(kernel: LibraryKernel) -> None:
    """Check that the signature accepts the op's arguments, and its outputs exactly if the wrapper declares them."""
    w, fp = workload(kernel.op), known.load("h200")
    recipe = kernel.recipe(w, fp, kernel.knobs(w, fp))
    assert isinstance(recipe, PythonRecipe)
    module, _, name = recipe.target.partition(":")
    function = getattr(import_module(module), name)
    assert takes_outputs(OPS[kernel.op], parameters_of(function), name) == kernel.writes_out


# PyTorch's own package plays a library: it is installed, and has a version.
HERE = Library(distribution="torch", module="json", least_version=(1, 0), needs=("dumps",))


def test_a_library_that_can_be_called_is_accepted(home: Path) -> None:
    kernel = LibraryKernel("rmsnorm", "liger:rmsnorm", HERE, backend="LIGER")
    assert kernel.supports(workload("rmsnorm"), known.load("h200")) == Accepted()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"least_version": (99, 1)}, "is too old; needs 99.1"),
        ({"least_cc": (12, 0)}, "needs compute capability 12.0; the device has 9.0"),
        ({"most_cc": (8, 9)}, "needs compute capability 8.0 to 8.9; the device has 9.0"),
        ({"module": "no_such_module"}, "cannot be imported: ModuleNotFoundError"),
        ({"needs": ("no_such_function",)}, "cannot be imported: AttributeError"),
    ],
)
def test_the_reason_for_leaving_out_an_installed_library_is_given(
    home: Path, change: dict[str, object], reason: str
) -> None:
    kernel = LibraryKernel("rmsnorm", "liger:rmsnorm", replace(HERE, **change), backend="LIGER")  # type: ignore[arg-type]
    assert reason in kernel.why_not(workload(kernel.op), known.load("h200"))


def test_faults_of_the_environment_are_not_cached(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(HERE, module="no_such_module")
    monkeypatch.setattr(probe, "_tried", lambda *_: ("out of memory", False))
    assert "out of memory" in base.unimportable(gone, "2")
    monkeypatch.setattr(probe, "_tried", lambda *_: ("", True))
    assert base.unimportable(gone, "2") == ""


def test_on_a_cpu_no_library_is_searched_for(home: Path) -> None:
    cpu = replace(known.load("h200"), kind="cpu")
    assert all("the device is a CPU" in kernel.why_not(workload(kernel.op), cpu) for kernel in WRAPPED)
    assert not (home / "cache").exists()


@pytest.mark.parametrize(
    ("kernel", "dims", "traits", "reason"),
    [
        (of(flashinfer, "attn"), {**HEADS, "B": 2}, {}, "one sequence per call"),
        (of(flashinfer, "attn"), {**HEADS, "D": 80}, {}, "80 wide"),
        (of(flashinfer, "attn"), HEADS, {"window": 64}, "no window"),
        (of(flash_attn, "attn", ":attn"), {**HEADS, "D": 512}, {}, "512"),
        (of(flash_attn, "paged_attn", ":paged_attn"), {**HEADS, "page": 16}, {}, "a multiple of 256 tokens"),
        (of(quack, "rmsnorm"), {"M": 2, "d": 512}, {"offset": 1.0}, "no weight offset"),
        (of(quack, "add_rmsnorm"), {"M": 2, "d": 512}, {"sandwich": 1}, "normalises first"),
        (of(quack, "linear"), {**LINEAR, "N": 12}, {}, "in steps of 8"),
        (of(sgl, "add_rmsnorm"), {"M": 2, "d": 512}, {"sandwich": 1}, "normalises first"),
        (of(sgl, "rope"), {**ROPE, "D": 80, "R": 80}, {}, "80 wide"),
        (of(flash_attn, "attn", "attn_4"), {**HEADS, "D": 512}, {}, "up to 256 wide"),
        (of(liger, "geglu"), {"M": 2, "I": 512}, {}, "tanh"),
        (of(flashinfer, "swiglu"), {"M": 2, "I": 509}, {}, "vectors of 8"),
        (of(sgl, "geglu"), {"M": 2, "I": 12}, {}, "vectors of 8"),
        (of(liger, "rope"), ROPE, {"style": 1}, "interleaved"),
        (of(liger, "rope"), {**ROPE, "R": 64}, {}, "whole heads only"),
        (of(liger, "add_rmsnorm"), {"M": 2, "d": 512}, {"sandwich": 1}, "normalises first"),
        (of(flashinfer, "add_rmsnorm"), {"M": 2, "d": 512}, {"sandwich": 1}, "normalises first"),
        (of(flashinfer, "add_rmsnorm"), {"M": 2, "d": 512}, {"sandwich": 2}, "unrounded"),
        (of(flashinfer, "add_rmsnorm"), {"M": 2, "d": 512}, {"offset": 0.5}, "no weight offset"),
        (of(flashinfer, "rope"), {**ROPE, "D": 80, "R": 80}, {}, "80 wide"),
        (of(flashinfer, "rope"), {**ROPE, "R": 24}, {}, "in steps of 16"),
        (of(flashinfer_mm, "linear", "cudnn"), LINEAR, {"bias": True}, "adds no bias"),
        (of(flashinfer_mm, "linear", "cudnn"), {**LINEAR, "K": 509}, {}, "in steps of 8 and K of 8"),
        (of(flashinfer_mm, "linear", "tinygemm"), {**LINEAR, "N": 24}, {}, "in steps of 16 and K of 64"),
        (of(flashinfer_mm, "linear", "tgv"), LINEAR, {}, "not for compute capability 9.0"),
        (of(flashinfer_paged, "paged_attn", "planned"), {**PAGED, "S": 3}, {}, "one position"),
        (of(flashinfer_paged, "paged_attn", "planned"), {**PAGED, "D": 80}, {}, "80 wide"),
        (of(flashinfer_paged, "paged_attn", "xqa"), PAGED, {"softcap": 30.0}, "no softcap"),
        (of(flashinfer_paged, "paged_attn", "xqa"), {**PAGED, "page": 24}, {}, "pages of 16, 32, 64, 128"),
        (sdpa.KERNELS[2], HEADS, {}, "no grouped heads"),
        (sdpa.KERNELS[0], {**HEADS, "L": 1}, {}, "more than one key"),
        (sdpa.KERNELS[0], {**HEADS, "D": 100}, {}, "in steps of 8"),
        (sdpa.KERNELS[0], {**HEADS, "D": 512}, {}, "up to 256 wide"),
        (sdpa.KERNELS[0], {**HEADS, "S": 3}, {}, "one position"),
        (sdpa.KERNELS[1], HEADS, {"softcap": 30.0}, "softcap"),
    ],
)
def test_shapes_that_a_library_has_no_kernel_for_are_refused(
    kernel: LibraryKernel, dims: dict[str, int], traits: dict[str, Any], reason: str
) -> None:
    assert reason in kernel.why_not(OPS[kernel.op].workload("bf16", dims, **traits), known.load("h200"))


def test_flashinfer_gets_contiguous_operands_if_it_requires_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy such operands: without tensor cores its decode refuses a cache that is not full, and strided queries."""
    import torch

    def decode(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, use_tensor_cores: bool, **_: object
    ) -> torch.Tensor:
        assert use_tensor_cores or all(t.is_contiguous() for t in (q, k, v))
        asked.append(use_tensor_cores)
        return q

    asked: list[bool] = []
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(single_decode_with_kv_cache=decode))
    for heads, length in ((2, 512), (2, 100), (8, 512), (8, 100)):
        q, cache = torch.zeros(1, heads, 1, 64), torch.zeros(1, 2, 512, 64)
        flashinfer.attn(q, cache, cache, None, length, 0.0, 0, 0.0)
    assert asked == [False, True, True, True]


def test_only_misaligned_operands_are_copied() -> None:
    """Copy only misaligned operands: a library's load of 16 bytes from such an address would end the process."""
    import torch

    whole = torch.arange(64.0).bfloat16().view(4, 16)
    rows = torch.zeros(4, 24).bfloat16()[:, :16]
    assert base.aligned(whole) is whole and base.aligned(rows) is rows
    for t in (torch.arange(65.0).bfloat16()[1:].view(4, 16), torch.zeros(4, 17).bfloat16()[:, :16], whole.t()):
        made = base.aligned(t)
        assert made is not t and made.equal(t) and made.is_contiguous() and made.data_ptr() % 16 == 0


def test_a_renamed_library_is_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sgl_kernel = Library(distribution="no-such-kernel", renamed="torch", module="torch", least_version=(1, 0))
    assert sgl_kernel.version() == HERE.version() != ""
    assert replace(sgl_kernel, renamed="no-such-kernel-either").version() == ""


def test_another_version_of_a_library_is_another_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = PythonRecipe(target=f"{base.PACKAGE}.liger:rmsnorm")
    digests = set()
    for version in ("0.8.4", "0.8.5"):
        monkeypatch.setattr(Library, "version", lambda self, v=version: v)
        digests.add(python_digest(recipe))
    assert len(digests) == 2


def test_versions_compare_as_numbers() -> None:
    assert parsed("0.10.2") > parsed("0.9.9")
    assert parsed("2.8.3.post1") == (2, 8, 3)
    assert parsed("4.0.0b36") == (4, 0, 0)


def test_compilations_of_a_library_stay_within_a_workers_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the jobs: ninja starts one per core by default, and each nvcc job has several processes."""
    monkeypatch.setenv("MAX_JOBS", "96")
    assert 8 * int(settings.passed_to_workers()["MAX_JOBS"]) <= Limits().processes
