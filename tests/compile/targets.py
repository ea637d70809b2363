"""List the compute capabilities for which tests compile each family of kernels.

The compile-time parameters of a CUDA kernel exist for every capability (test_machine_code.py takes those of all known
devices for a capability without one). For a Triton or CUTLASS kernel they come from a device, so only known devices are
used.
"""

from __future__ import annotations

from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from tests.compile.cutlass_asked import BY_NAME, ROWS, product

Capability = tuple[int, int]

CUDA: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def of_known_devices() -> tuple[Capability, ...]:
    return tuple(sorted({facts(known.load(name)).cc for name in known.names()}))


def of_cutlass(source: str) -> tuple[Capability, ...]:
    """Return the capabilities of known devices on which the product supports some number of rows."""
    fits = {
        f.cc
        for f in (facts(known.load(name)) for name in known.names())
        if any(not BY_NAME[source].limits(product(m, 4096, 4096, "bf16"), f) for m in ROWS)
    }
    return tuple(sorted(fits))


OTHERS = {"gemm_sm90", "step", "probes", "grid_sync"}


def run_as_ptx() -> set[str]:
    """Return our sources whose PTX the tests run."""
    from tests.compile.test_ptx_kernels import KERNELS

    return {name for kernels in KERNELS.values() for name, _ in kernels} | OTHERS
