"""Test which CUTLASS products support a workload on a device, the reasons, and their compilation; no GPU needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autosel import resources
from autosel.candidates.cutlass.products import KERNELS
from autosel.candidates.registry import own_candidates
from autosel.errors import BuildError
from autosel.fingerprint.known import load, names
from autosel.native import cutlass
from autosel.native.compile import source_digest
from autosel.native.cuda import Nvcc
from autosel.native.cutlass import Headers
from autosel.values import Accepted, Fingerprint, NativeRecipe, Workload

pytestmark = pytest.mark.usefixtures("any_compiler")
H200, RTX = load("h200"), load("rtx-5070-ti")
BY_NAME = {k.name: k for k in KERNELS if k.op == "linear"}
HEADS = {k.name: k for k in KERNELS if k.op == "lm_head"}


def linear(m: int, n: int = 4096, k: int = 4096, dtype: Any = "bf16") -> Workload:
    return Workload(op="linear", dims=(("M", m), ("N", n), ("K", k)), dtype=dtype)


def headers(*version: int) -> Headers:
    return Headers(include=Path("/include"), version=(version[0], version[1], version[2]))


def test_the_registry_lists_the_products() -> None:
    assert {c.name for c in own_candidates() if c.backend == "CUTLASS"} == set(BY_NAME) == set(HEADS)


@pytest.mark.parametrize("device", names())
@pytest.mark.parametrize("m", [16, 64, 256, 4096])
def test_every_known_device_has_a_product_for_many_rows(device: str, m: int) -> None:
    answers = {k.name: k.supports(linear(m), load(device)) for k in BY_NAME.values()}
    assert any(isinstance(a, Accepted) for a in answers.values()), answers


@pytest.mark.parametrize(
    ("name", "w", "fp", "words"),
    [
        ("cutlass:gemm_sm90", linear(64), RTX, "needs compute capability 9.0; the device has 12.0"),
        ("cutlass:gemm_sm90", linear(64), load("b200"), "the device has 10.0"),
        ("cutlass:gemm_sm90", linear(1), H200, "below half of 7, where CUDA cores win by far"),
        ("cutlass:gemm_sm90", linear(64, dtype="fp32"), H200, "supports bf16, fp16; the workload is fp32"),
        ("cutlass:gemm_sm90", linear(64, k=4100), H200, "rows of K = 4100 elements are not whole vectors of 16 bytes"),
        ("cutlass:gemm_sm80", linear(64, n=50257), RTX, "rows of N = 50257"),
        ("cutlass:gemm_sm80", linear(4096), H200, "cutlass:gemm_sm90's range"),
        ("cutlass:gemm_sm80", linear(1 << 31), RTX, "M = 2147483648 is above"),
    ],
)
def test_unsupported_products_are_refused_before_a_build(name: str, w: Workload, fp: Fingerprint, words: str) -> None:
    assert words in BY_NAME[name].why_not(w, fp)


@pytest.mark.parametrize("name", HEADS)
def test_logits_come_from_the_build_that_serves_a_projection_of_that_shape(name: str) -> None:
    fp = H200 if name == "cutlass:gemm_sm90" else RTX
    head = Workload(op="lm_head", dims=(("M", 16), ("V", 4096), ("d", 4096)), dtype="bf16")
    one = HEADS[name].recipe(head, fp, HEADS[name].knobs(head, fp))
    other = BY_NAME[name].recipe(linear(16), fp, BY_NAME[name].knobs(linear(16), fp))
    assert isinstance(one, NativeRecipe)
    assert isinstance(other, NativeRecipe)
    assert (one.source, one.flags) == (other.source, other.flags)
    assert isinstance(HEADS[name].supports(head, fp), Accepted)
    greedy = Workload(op="lm_head", dims=head.dims, dtype="bf16", traits=(("greedy", 1),))
    ragged = Workload(op="lm_head", dims=(("M", 16), ("V", 50257), ("d", 4096)), dtype="bf16")
    for w, words in ((greedy, "returns logits"), (ragged, "rows of V = 50257")):
        assert words in HEADS[name].why_not(w, fp)


@pytest.mark.parametrize("found", [None, headers(3, 9, 0)], ids=["none", "too old"])
def test_without_the_headers_the_reason_says_what_is_missing(
    found: Headers | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutlass, "find_headers", lambda: found)
    said = BY_NAME["cutlass:gemm_sm80"].why_not(linear(64), RTX)
    assert (
        "nvidia-cutlass>=4.2" if found is None else "needs CUTLASS 4.2; the headers found are of CUTLASS 3.9.0"
    ) in said


def test_a_build_names_the_version_of_its_headers_not_their_folder(
    any_compiler: Nvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.native.compile.find_compiler", lambda: any_compiler)
    one, other = source_digest("cutlass/gemm_sm80.cu", ()), source_digest("cuda/gemv.cu", ())
    monkeypatch.setattr(cutlass, "find_headers", lambda: Headers(include=Path("/elsewhere"), version=(4, 2, 0)))
    assert source_digest("cutlass/gemm_sm80.cu", ()) == one
    monkeypatch.setattr(cutlass, "find_headers", lambda: headers(4, 3, 0))
    assert source_digest("cutlass/gemm_sm80.cu", ()) != one
    monkeypatch.setattr(cutlass, "find_headers", lambda: None)
    assert source_digest("cuda/gemv.cu", ()) == other
    with pytest.raises(BuildError, match="no CUTLASS headers"):
        source_digest("cutlass/gemm_sm80.cu", ())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_product_takes_the_knobs_its_formula_gives(name: str) -> None:
    kernel = BY_NAME[name]
    for fp in (H200, RTX):
        for m in (8, 100, 256, 4096):
            knobs = kernel.knobs(linear(m), fp)
            recipe = kernel.recipe(linear(m), fp, knobs)
            assert isinstance(recipe, NativeRecipe)
            assert set(kernel.knob_args) | set(kernel.macros) == set(knobs.values)
            assert all(isinstance(v, int) for v in knobs.values.values())
            assert {f"-D{macro}={knobs[k]}" for k, macro in kernel.macros.items()} <= set(recipe.flags)
            assert "-DAUTOSEL_BF16" in recipe.flags
            assert not any(f.startswith(("-I", "/")) for f in recipe.flags)  # does not depend on this machine


def test_a_bucket_of_rows_shares_one_build() -> None:
    """Check that parameters that vary between steps need no other build, because compiling takes half a minute."""
    for name, fp in (("cutlass:gemm_sm90", H200), ("cutlass:gemm_sm80", RTX)):
        kernel = BY_NAME[name]
        flags = {kernel.recipe(linear(m), fp, kernel.knobs(linear(m), fp)).flags for m in (33, 40, 63, 64)}  # type: ignore[union-attr]
        assert len(flags) == 1


@pytest.mark.parametrize("name", BY_NAME)
def test_a_product_has_a_source_with_its_entry_and_a_complete_header(name: str) -> None:
    kernel = BY_NAME[name]
    text = (resources.kernels() / "cutlass" / f"{kernel.source}.cu").read_text()
    for entry in (kernel.entry, HEADS[name].entry):
        assert re.search(rf"EXPORT\w*\({entry},", text)
    head = text.partition("#include")[0]
    for part in ("bytes", "FLOPs", "roofline", "knobs", "design", "idea", "status  compiled.*; "):
        assert re.search(rf"^// .*{part}", head, flags=re.MULTILINE), part
