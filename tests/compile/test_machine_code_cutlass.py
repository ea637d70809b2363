"""The CUTLASS products compile for their targets to the instructions they are for, without spills; and in what time.

By default one build, another one each day; --every-target takes all.
"""

from __future__ import annotations

from operator import attrgetter

import pytest

from autosel.fingerprint import known
from autosel.native import cutlass
from autosel.values import NativeRecipe
from tests.compile.cutlass_asked import BY_NAME, Build, builds
from tests.compile.cutlass_builds import Kernel, compiled

pytestmark = pytest.mark.skipif(bool(cutlass.why_not()), reason=cutlass.why_not())

# 65536 registers / (threads * CTAs an SM): 384 threads and one CTA; 128 or 256 threads, two CTAs or one.
REGISTERS = {"gemm_sm90": 168, "gemm_sm80": 255}
EXPECTED = {
    "gemm_sm90": ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS"),
    "gemm_sm80": ("HMMA", "LDGSTS", "LDSM"),
}


@pytest.mark.in_turns(builds, label=attrgetter("label"))
def test_a_build_is_the_machine_code_it_is_meant_to_be(choice: Build) -> None:
    wrong = _faults(choice)
    assert not wrong, "\n".join([choice.label, *wrong])


def _faults(build: Build) -> list[str]:
    fp = known.load(build.device)
    recipe = BY_NAME[build.source].recipe(build.workload, fp, build.knobs)
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
