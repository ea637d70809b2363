"""Test which CUDA kernels support a workload on a device, the reasons, and how they are compiled; no GPU needed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from autosel import resources
from autosel.candidates.base import support_of
from autosel.candidates.cuda.base import CudaKernel
from autosel.candidates.registry import own_candidates
from autosel.fingerprint.known import load, names
from autosel.native import cuda
from autosel.values import Accepted, Fingerprint, NativeRecipe, Workload

pytestmark = pytest.mark.usefixtures("any_compiler")
H200, RTX = load("h200"), load("rtx-5070-ti")
KERNELS = {c.name: c for c in own_candidates() if isinstance(c, CudaKernel)}
DIMS: dict[str, dict[str, int]] = {
    "linear": {"M": 1, "N": 4096, "K": 4096},
    "norm_qkv": {"M": 1, "d": 4096, "N": 6144},
    "gate_up": {"M": 1, "d": 4096, "I": 14336},
    "lm_head": {"M": 1, "V": 128256, "d": 4096},
    "rmsnorm": {"M": 1, "d": 4096},
    "add_rmsnorm": {"M": 1, "d": 4096},
    "rope": {"M": 1, "Hq": 32, "Hkv": 8, "D": 128, "R": 128},
    "swiglu": {"M": 1, "I": 14336},
    "geglu": {"M": 1, "I": 14336},
    "kv_append": {"B": 1, "Hkv": 8, "S": 1, "D": 128},
    "attn": {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "L": 8192},
    "paged_attn": {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "L": 8192, "page": 16},
    "sample": {"B": 1, "V": 128256, "L": 64},
}


def workload(op: str, dtype: Any = "bf16", **changes: int) -> Workload:
    return Workload(op=op, dims=tuple({**DIMS[op], **changes}.items()), dtype=dtype)


def of_fp8(op: str, dtype: Any = "bf16", **changes: int) -> Workload:
    """Return the workload with weights or a cache in e4m3."""
    traits = {"linear": ("weight", "fp8_e4m3-row"), "attn": ("cache", "fp8_e4m3-head")}
    return dataclasses.replace(workload(op, dtype, **changes), traits=(traits[op],))


def with_cc(fp: Fingerprint, cc: str) -> Fingerprint:
    return dataclasses.replace(fp, identity={**fp.identity, "cc": cc})


@pytest.mark.parametrize("device", names())
def test_every_decode_op_has_a_kernel_for_every_known_device(device: str) -> None:
    for w in (*map(workload, DIMS), of_fp8("linear"), of_fp8("attn")):
        answers = {k.name: support_of(k, w, load(device)) for k in KERNELS.values() if k.op == w.op}
        assert any(isinstance(a, Accepted) for a in answers.values()), answers


@pytest.mark.parametrize(
    ("name", "w", "fp", "words"),
    [
        ("cuda:rmsnorm", workload("rmsnorm"), with_cc(RTX, "7.5"), "needs compute capability 8.0; the device has 7.5"),
        ("cuda:rmsnorm", workload("rmsnorm"), with_cc(RTX, "12.9"), "cannot compile for compute capability 12.9"),
        ("cuda:rmsnorm", workload("rmsnorm", "fp8_e4m3"), H200, "supports bf16, fp16, fp32"),
        ("cuda:rmsnorm", workload("rmsnorm", M=1 << 31), H200, "M = 2147483648 is above"),
        ("cuda:gemv", workload("linear", M=64), H200, "M = 64 is above"),
        ("cuda:gemv_fp8", of_fp8("linear", M=17), H200, "M = 17 is above 16"),
        ("cuda:gemv_fp8", of_fp8("linear", "fp32"), H200, "supports bf16, fp16; the workload is fp32"),
        ("cuda:attn_decode", workload("attn", "fp32", D=512), RTX, "needs 131072 bytes of shared memory"),
        ("cuda:attn_decode_fp8", of_fp8("attn", D=2064), H200, "do not fit a warp's registers"),
        ("cuda:attn_decode_fp8", of_fp8("attn", B=70_000), H200, "a grid's limit"),
        ("cuda:attn_decode", workload("attn", D=2048), H200, "do not fit a warp's registers"),
        ("cuda:attn_decode", workload("attn", B=70_000), H200, "a grid's limit"),
        ("cuda:attn_decode_mma", workload("attn", "fp32"), H200, "supports bf16, fp16"),
        ("cuda:attn_decode_mma", workload("attn", Hq=8), H200, "leave tiles of 16 empty"),
        ("cuda:attn_decode_mma", workload("attn", D=320), H200, "do not fit a warp's registers"),
        ("cuda:sample", workload("sample", V=1 << 20), RTX, "shared memory"),
    ],
)
def test_unsupported_workloads_are_refused_before_a_build(name: str, w: Workload, fp: Fingerprint, words: str) -> None:
    assert words in KERNELS[name].why_not(w, fp)


def test_without_nvcc_the_reason_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_nvcc", lambda: None)
    assert "pip" in KERNELS["cuda:gemv"].why_not(workload("linear"), H200)


def test_a_kernel_is_compiled_for_the_architecture_of_its_device_and_for_its_knobs() -> None:
    kernel, w = KERNELS["cuda:gemv"], workload("linear")
    flags = set()
    for fp, arch in ((H200, "90a"), (RTX, "120a"), (load("l4"), "89")):
        knobs = kernel.knobs(w, fp)
        recipe = kernel.recipe(w, fp, knobs)
        assert isinstance(recipe, NativeRecipe)
        assert f"arch=compute_{arch},code=sm_{arch}" in recipe.flags
        assert f"-DAUTOSEL_UNROLL={knobs['unroll']}" in recipe.flags
        flags.add(recipe.flags)
    assert len(flags) == 3
    assert [kernel.knobs(w, fp)["unroll"] for fp in (H200, RTX)] == [4, 2]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_the_knobs_its_formula_gives(name: str) -> None:
    kernel = KERNELS[name]
    for fp in (H200, RTX):
        knobs = kernel.knobs(workload(kernel.op), fp)
        assert set(kernel.knob_args) | set(kernel.macros) <= set(knobs.values)
        assert all(isinstance(knobs[k], int) for k in kernel.knob_args)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_a_source_with_its_entry_and_a_complete_header(name: str) -> None:
    kernel = KERNELS[name]
    text = (resources.kernels() / "cuda" / f"{kernel.source}.cu").read_text()
    assert f"AUTOSEL_EXPORT({kernel.source}," in text
    head = text.partition("#include")[0]
    for part in (
        "bytes",
        "FLOPs",
        "roofline",
        "knobs",
        "design",
        "status  compiled and emulated; ",
    ):
        assert re.search(rf"^// .*{part}", head, flags=re.MULTILINE), part
