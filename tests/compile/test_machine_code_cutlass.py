"""The CUTLASS products compile for their targets to the instructions they are for, without spills; and in what time.

By default one build, another one each day; --every-target takes all.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autosel.candidates.cutlass.products import KERNELS, CutlassKernel
from autosel.fingerprint.known import load
from autosel.native import cutlass
from autosel.values import DTypeName, NativeRecipe, Workload
from tests.compile.cutlass_builds import Kernel, compiled
from tests.compile.emulate import todays_turn

pytestmark = pytest.mark.skipif(bool(cutlass.why_not()), reason=cutlass.why_not())

BY_NAME: dict[str, CutlassKernel] = {k.source: k for k in KERNELS if k.op == "linear"}


@dataclass(frozen=True, kw_only=True)
class Build:
    """What the formula asks for on one device at one shape: the build that is going to be raced there."""

    source: str
    device: str
    m: int
    n: int
    k: int
    dtype: DTypeName = "bf16"

    @property
    def label(self) -> str:
        return f"{self.source} {self.device} M{self.m} N{self.n} K{self.k} {self.dtype}"


# Each way of the formulas: streaming narrow, wide, split; large whole, clustered, Stream-K; every architecture.
BUILDS = (
    Build(source="gemm_sm90", device="h200", m=16, n=4096, k=4096),
    Build(source="gemm_sm80", device="rtx-5070-ti", m=16, n=4096, k=4096),
    Build(source="gemm_sm90", device="h200", m=8, n=1024, k=4096, dtype="fp16"),  # split
    Build(source="gemm_sm80", device="a100-80", m=4096, n=4096, k=4096),
    Build(source="gemm_sm90", device="h200", m=4096, n=4096, k=4096),
    Build(source="gemm_sm80", device="l4", m=128, n=28672, k=4096, dtype="fp16"),
    Build(source="gemm_sm90", device="h200", m=256, n=4096, k=14336, dtype="fp16"),  # a cluster of two
    Build(source="gemm_sm80", device="b200", m=64, n=6144, k=4096),
    Build(source="gemm_sm90", device="h200", m=128, n=28672, k=4096),
    Build(source="gemm_sm80", device="h200", m=64, n=1024, k=4096, dtype="fp16"),
    Build(source="gemm_sm90", device="h100", m=640, n=2048, k=8192),  # Stream-K
    Build(source="gemm_sm80", device="rtx-4090", m=256, n=4096, k=14336),
)
# 65536 registers / (threads * CTAs an SM): 384 threads and one CTA; 128 or 256 threads, two CTAs or one.
REGISTERS = {"gemm_sm90": 168, "gemm_sm80": 255}
EXPECTED = {
    "gemm_sm90": ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS"),
    "gemm_sm80": ("HMMA", "LDGSTS", "LDSM"),
}


def test_a_build_is_the_machine_code_it_is_meant_to_be(every_target: bool) -> None:
    wrong = []
    for build in BUILDS if every_target else [BUILDS[todays_turn() % len(BUILDS)]]:
        wrong += [f"{build.label}: {fault}" for fault in _faults(build)]
    assert not wrong, "\n".join(wrong)


def _faults(build: Build) -> list[str]:
    candidate, fp = BY_NAME[build.source], load(build.device)
    w = Workload(op="linear", dims=(("M", build.m), ("N", build.n), ("K", build.k)), dtype=build.dtype)
    recipe = candidate.recipe(w, fp, candidate.knobs(w, fp))
    assert isinstance(recipe, NativeRecipe)
    made = compiled(recipe)
    print(f"{build.label}: {made.seconds:.0f} s")  # noqa: T201  (what a tune will wait for)
    main, plain = _parted(made.kernels)
    found = [f"ptxas: {words}" for words in made.advice]  # wgmma put in line: half the rate
    if main.registers > REGISTERS[build.source]:
        found.append(f"{main.registers} registers, budget {REGISTERS[build.source]}")
    found += [f"{k.name} spills: {k}" for k in (main, plain) if k.spill_bytes or k.stack_bytes]
    found += [f"no {i}: {main.instructions}" for i in EXPECTED[build.source] if not main.instructions.get(i)]
    # The scheduler by which tiles are shared does not know of dependent launches.
    dependent = float(str(fp.identity["cc"])) >= 9 and "-DAUTOSEL_STREAM_K=1" not in recipe.flags
    if bool(main.instructions.get("ACQBULK")) != dependent:
        found.append(f"programmatic dependent launch: expected {dependent}")
    return found


def _parted(kernels: tuple[Kernel, ...]) -> tuple[Kernel, Kernel]:
    """The product, and the one for operands that are not aligned."""
    plain = [k for k in kernels if "plain_product" in k.name]
    main = [k for k in kernels if k not in plain]
    assert len(plain) == len(main) == 1, [k.name for k in kernels]
    return main[0], plain[0]
