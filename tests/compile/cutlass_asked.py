"""List every CUTLASS build that the formulas give on a known device, with a shape for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

from autosel.candidates.cutlass.products import KERNELS, CutlassKernel
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.values import Accepted, DTypeName, Knobs, Workload

BY_NAME: dict[str, CutlassKernel] = {k.source: k for k in KERNELS if k.op == "linear"}


@dataclass(frozen=True, kw_only=True)
class Build:
    """The formula's build for one device at one shape, which a tune there would race."""

    source: str
    device: str
    m: int
    n: int
    k: int
    dtype: DTypeName = "bf16"

    @property
    def workload(self) -> Workload:
        return product(self.m, self.n, self.k, self.dtype)

    @property
    def knobs(self) -> Knobs:
        return BY_NAME[self.source].knobs(self.workload, known.load(self.device))

    @property
    def label(self) -> str:
        return f"{self.source} {self.device} M{self.m} N{self.n} K{self.k} {self.dtype}"


# Shapes that produce all results of a formula: every bucket of M, few tiles and many, even and ragged waves.
ROWS = (4, 6, 17, 48, 96, 128, 160, 256, 320, 384, 2048)
OUTPUTS = (256, 1024, 1152, 2048, 3072, 4096, 5120, 6144, 8192, 10_240, 28_672, 53_248)
DEPTHS = (4096, 8192, 14_336, 28_672)


@cache
def builds() -> tuple[Build, ...]:
    """Return each set of macros that the formulas give on the known devices of a compute capability, at the first shape
    with it; every other one in fp16. It includes tiles of 64 and 128 rows, split, clustered, Stream-K, all stages."""
    found: dict[object, Build] = {}
    for device, candidate in itertools.product(known.names(), BY_NAME.values()):
        fp = known.load(device)
        for m, n, k in itertools.product(ROWS, OUTPUTS, DEPTHS):
            w = product(m, n, k, "bf16")
            if not isinstance(candidate.supports(w, fp), Accepted):
                continue
            knobs = candidate.knobs(w, fp)
            compiled_in = (candidate.source, facts(fp).cc, *(knobs[name] for name in candidate.macros))
            dtype: DTypeName = ("bf16", "fp16")[len(found) % 2]
            found.setdefault(compiled_in, Build(source=candidate.source, device=device, m=m, n=n, k=k, dtype=dtype))
    return tuple(found.values())


def product(m: int, n: int, k: int, dtype: DTypeName) -> Workload:
    return Workload(op="linear", dims=(("M", m), ("N", n), ("K", k)), dtype=dtype)
