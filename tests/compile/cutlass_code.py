"""State the expected properties of a CUTLASS product's machine code."""

from __future__ import annotations

from autosel.fingerprint import known
from autosel.values import NativeRecipe
from tests.compile.cutlass_asked import BY_NAME, Build
from tests.compile.cutlass_builds import Compiled, Kernel

# 65536 registers / (threads * CTAs an SM): 384 threads and one CTA; 128 or 256 threads, two CTAs or one.
REGISTERS = {"gemm_sm90": 168, "gemm_sm80": 255}
EXPECTED = {
    "gemm_sm90": ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS"),
    "gemm_sm80": ("HMMA", "LDGSTS", "LDSM"),
}


def recipe_of(build: Build) -> NativeRecipe:
    recipe = BY_NAME[build.source].recipe(build.workload, known.load(build.device), build.knobs)
    assert isinstance(recipe, NativeRecipe)
    return recipe


def faults(build: Build, made: Compiled) -> list[str]:
    """Return the differences of the machine code from the expectation."""
    main, plain = _parted(made.kernels)
    found = [f"ptxas: {words}" for words in made.advice]  # wgmma serialised: half the rate
    if main.registers > REGISTERS[build.source]:
        found.append(f"{main.registers} registers, budget {REGISTERS[build.source]}")
    found += [f"{k.name} spills: {k}" for k in (main, plain) if k.spill_bytes or k.stack_bytes]
    found += [f"no {i}: {main.instructions}" for i in EXPECTED[build.source] if not main.instructions.get(i)]
    # The scheduler that shares tiles does not support dependent launches.
    recipe = recipe_of(build)
    dependent = float(str(known.load(build.device).identity["cc"])) >= 9 and "-DAUTOSEL_STREAM_K=1" not in recipe.flags
    if bool(main.instructions.get("ACQBULK")) != dependent:
        found.append(f"programmatic dependent launch: expected {dependent}")
    return found


def _parted(kernels: tuple[Kernel, ...]) -> tuple[Kernel, Kernel]:
    """Return the product's kernel, and the kernel for unaligned operands."""
    plain = [k for k in kernels if "plain_product" in k.name]
    main = [k for k in kernels if k not in plain]
    assert len(plain) == len(main) == 1, [k.name for k in kernels]
    return main[0], plain[0]
