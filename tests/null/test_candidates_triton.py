"""Check that refusals of a device or a shape by a Triton kernel come before compilation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autosel import resources
from autosel.candidates.registry import own_candidates
from autosel.candidates.source import TRITON_KERNELS
from autosel.candidates.triton.base import TritonKernel
from autosel.fingerprint import known
from autosel.native import cuda
from autosel.ops import OPS
from autosel.values import Fingerprint, Workload
from tests.operands import for_kernel

KERNELS = [c for c in own_candidates() if isinstance(c, TritonKernel)]
H200 = known.load("h200")


def of_capability(cc: str) -> Fingerprint:
    return replace(H200, identity={**H200.identity, "cc": cc})


def plain(op: str, **dims: int) -> Workload:
    """Return a workload with dimensions of 128 (pages of 16) by default, and equal numbers of heads."""
    names = OPS[op].dim_names
    usual = {n: {"page": 16, "S": 1, "B": 1}.get(n, 128) for n in names}
    return OPS[op].workload("bf16", {**usual, **{n: v for n, v in dims.items() if n in names}})


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.op} {k.name}")
def test_every_kernel_refuses_what_it_cannot_run(kernel: TritonKernel) -> None:
    w = for_kernel(kernel, plain(kernel.op, Hq=4, Hkv=4, M=1))
    assert "compute capability 8.0" in kernel.why_not(w, of_capability("7.5"))
    assert "the device is a CPU" in kernel.why_not(w, replace(H200, kind="cpu"))
    assert "fp8_e4m3" in kernel.why_not(replace(w, dtype="fp8_e4m3"), H200)
    longest = next(n for n in ("V", "I", "N", "L", "d", "Hq", "Hkv") if n in dict(w.dims))
    assert f"{longest} = {2**31} is above 2^31 - 1" in kernel.why_not(w.at(**{longest: 2**31}), H200)


def test_fp8_weights_need_a_device_for_which_triton_converts_them() -> None:
    kernel = next(k for k in KERNELS if k.source == "gemv_fp8")
    w = for_kernel(kernel, plain("linear", M=1))
    for cc in ("8.0", "8.6"):
        assert "converts e4m3 from compute capability 8.9" in kernel.why_not(w, of_capability(cc))
    assert "M = 9" in kernel.why_not(w.at(M=9), of_capability("8.9"))


def test_an_fp8_cache_needs_a_device_for_which_triton_converts_it() -> None:
    kernel = next(k for k in KERNELS if k.source == "attn_decode_fp8")
    w = for_kernel(kernel, plain("attn", D=128))
    assert "converts e4m3 from compute capability 8.9" in kernel.why_not(w, of_capability("8.6"))
    assert "supports heads up to 512 wide" in kernel.why_not(w.at(D=1024), of_capability("8.9"))


def imported(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            yield node.module


def test_a_kernel_imports_only_other_kernels_of_autosel_because_its_digest_covers_only_these() -> None:
    sources = sorted((resources.kernels() / "triton").glob("*.py"))
    ours = {f"{TRITON_KERNELS}.{source.stem}" for source in sources}
    taken = {name for source in sources for name in imported(source) if name.partition(".")[0] == "autosel"}
    assert taken and taken <= ours


def test_a_kernel_uses_the_same_name_for_the_driver_without_importing_it() -> None:
    sources = [source.read_text() for source in (resources.kernels() / "triton").glob("*.py")]
    assert {name for text in sources for name in re.findall(r'CDLL\("([^"]*)"\)', text)} == {cuda.DRIVER}
