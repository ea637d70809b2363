"""Spot checks: recompute a few elements of a served result natively, without running the baseline.

    check = find(workload, isa)              # None if it is not compiled (kernels/cpu/spot.cpp; `tune` compiles it)
    check(args, outs, seed)                  # largest |got - expected| / tolerance

A spot check takes microseconds, a shadow check milliseconds, so one call in 25 can have a spot check. A suspicious
result is judged like a shadow check, by the op's own bound. `Allowance` limits all spot checks of a process to a share
of the elapsed time, so that a small model's step does not lose a larger part than a large one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autosel import devices
from autosel.errors import BuildError
from autosel.native.compile import find_artefact, find_compiler, source_digest
from autosel.native.isa import ISA_FLAGS, Isa, best_isa
from autosel.native.load import load_entry
from autosel.values import DTypeName, Fingerprint, NativeRecipe, Workload

SOURCE = "cpu/spot.cpp"
OPS = (
    "linear", "norm_qkv", "gate_up", "lm_head", "rmsnorm", "add_rmsnorm", "swiglu", "geglu", "rope", "kv_append",
    "attn", "prefill_attn", "paged_attn", "sample",
)  # fmt: skip
SHARE = 0.0011  # of the elapsed time; with the shadow checks a step loses at most 0.3 % (rate.py)
MOST_NS = 10_000_000  # largest saved amount, and the amount at the start

Spot = Callable[[Sequence[Any], Sequence[Any], int], float]


def builds(workloads: Iterable[Workload], fp: Fingerprint) -> tuple[NativeRecipe, ...]:
    """Return what to compile for spot checks of these workloads on this device: nothing on a GPU."""
    if not devices.runs(fp.kind, "C++") or find_compiler() is None:
        return ()
    isa = best_isa(tuple(fp.identity["isa"]))
    return tuple(recipe(dtype, isa) for dtype in sorted({w.dtype for w in workloads if _covers(w)}))


def _covers(w: Workload) -> bool:
    """Return True for plain operands; results with weights or a cache in a format have only shadow checks."""
    plain = w.weight_format.plain and w.cache_format.plain
    return w.op in OPS and w.dtype in ("bf16", "fp16", "fp32") and plain


def recipe(dtype: DTypeName, isa: Isa) -> NativeRecipe:
    """Return the build with every op's check for one dtype."""
    return NativeRecipe(source=SOURCE, entry="spot_linear", flags=(*ISA_FLAGS[isa], f"-DAUTOSEL_{dtype.upper()}"))


def find(w: Workload, isa: Isa) -> Spot | None:
    """Return the compiled check of a workload on a CPU, or None. Compiles nothing."""
    return find_named(w.op, w.dtype, isa) if _covers(w) else None


def find_named(name: str, dtype: DTypeName, isa: Isa) -> Spot | None:
    """Return the compiled check `spot_<name>` for plain operands of a dtype, or None. Compiles nothing."""
    try:
        digest = source_digest(SOURCE, recipe(dtype, isa).flags)
        if find_artefact(digest) is None:
            return None
        entry = load_entry(digest, f"spot_{name}")
    except BuildError:  # no compiler, which is part of the digest
        return None

    def check(args: Sequence[Any], outs: Sequence[Any], seed: int) -> float:
        return float(entry(*args, *outs, seed))

    return check


@dataclass(slots=True)
class Allowance:
    """Nanoseconds that checks may use: a share of the elapsed time; a debt delays the next check.

    Threads share it without a lock: a lost update costs one check more or less.
    """

    share: float = SHARE
    clock: Callable[[], int] = time.perf_counter_ns
    saved_ns: float = MOST_NS
    at_ns: int = 0

    def may(self) -> bool:
        """Return True if a check may start now."""
        now = self.clock()
        self.saved_ns = min(MOST_NS, self.saved_ns + self.share * (now - (self.at_ns or now)))
        self.at_ns = now
        return self.saved_ns >= 0

    def spend(self, ns: float) -> None:
        self.saved_ns -= ns
