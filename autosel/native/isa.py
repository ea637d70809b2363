"""Define the instruction sets of the CPU sources: the CPU features each needs, and its compiler flags."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Isa = Literal["avx512bf16", "avx512", "avx2", "portable"]

# AVX-512 means F+BW+VL+DQ, which every AVX-512 server since Skylake has. Every CPU with BF16 has VBMI, except Cooper
# Lake, which runs as avx512.
ISA_NEEDS: dict[Isa, tuple[str, ...]] = {
    "avx512bf16": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi", "avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
# Compiler flags per instruction set: GCC and Clang name the features as Linux does, without underscores.
ISA_FLAGS: dict[Isa, tuple[str, ...]] = {
    isa: tuple(f"-m{need.replace('_', '')}" for need in needs) for isa, needs in ISA_NEEDS.items()
}


def best_isa(flags: Collection[str]) -> Isa:
    """Return the first instruction set whose requirements are all among the CPU's flags (Linux cpuinfo names)."""
    for isa, needs in ISA_NEEDS.items():
        if set(needs) <= set(flags):
            return isa
    return "portable"
