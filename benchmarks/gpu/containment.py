"""Stage 5: run kernels that fail in three unrecoverable ways and check that the next candidate is unaffected.

The faults are an illegal access, an endless kernel, and an allocation of all memory (faults.cu; on a CPU faults.cpp).
Each is proven as any candidate is. It must fail within its deadline and with the expected cause, its worker must be
gone, and the device memory must be free again. A good kernel proven after it must get the same proof as it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosel.values import Failed, Fingerprint, NativeRecipe, Parity, Passed
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table

if TYPE_CHECKING:
    from autosel.candidates.base import Candidate
    from autosel.parity.check import Proof

UNIT_S = 600.0
CALL_S = {"cuda": 10.0, "cpu": 4.0}  # deadline of a call that either takes microseconds or never ends
NO_MORE_S = 120.0  # limit for a fault and the good kernel after it, builds included
HELD_BYTES = 256 << 20  # device memory that other processes may take meanwhile
HERE = Path(__file__).parent

# Entry -> words of which at least one must occur in the check, the cause or the reason.
FAULTS: dict[str, tuple[str, ...]] = {
    "illegal_access": ("SIGSEGV", "illegal memory access", "unspecified launch failure"),
    "endless": ("timeout",),
    "out_of_memory": ("SIGABRT", "memory", "MemoryError"),
}


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return list(FAULTS)


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    good, bad = good_one(fp), faulty(unit, fp)
    alone, _ = on_trial([good], fp, scope)
    before = free_bytes(scope)
    began = time.monotonic()
    found, left = on_trial([bad, good], fp, scope)
    took, after = round(time.monotonic() - began, 1), free_bytes(scope)
    wrong = [
        *judged(found[0], FAULTS[unit]),
        *as_alone(found[1], alone[0]),
        *([f"{left} processes are left"] if left else []),
        *([f"{(before - after) >> 20} MiB of the device are still held"] if before - after > HELD_BYTES else []),
        *([f"it took {took} s"] if took > NO_MORE_S else []),
    ]
    told = {"outcome": "contained", "cause": cause(found[0]), "behind": type(found[1]).__name__.lower(), "took_s": took}
    if wrong:
        return {"ok": False, **told, "outcome": "escaped", "reason": "; ".join(wrong)}
    return {"ok": True, **told}


def good_one(fp: Fingerprint) -> Proof:
    """Return the proof of autosel's own kernel of the same op."""
    from autosel.candidates.registry import find

    return _built(find("rmsnorm", "cpp:rmsnorm" if fp.kind == "cpu" else "cuda:rmsnorm"), fp)


def faulty(entry: str, fp: Fingerprint) -> Proof:
    from autosel.candidates.user_source import UserSource

    file = HERE / ("faults.cpp" if fp.kind == "cpu" else "faults.cu")
    return _built(UserSource("rmsnorm", file, entry), fp)


def _built(candidate: Candidate, fp: Fingerprint) -> Proof:
    from autosel.native.compile import compile_source
    from autosel.ops import find
    from autosel.tuning.prove import proof_of
    from autosel.tuning.shortlist import way_of

    w = find("rmsnorm").workload("bf16", {"M": 2, "d": 1024})
    way = way_of(candidate, w, fp)
    assert isinstance(way.recipe, NativeRecipe)
    compile_source(way.recipe.source, way.recipe.flags)
    return proof_of(way, w)


def on_trial(proofs: list[Proof], fp: Fingerprint, scope: Scope) -> tuple[list[Parity], int]:
    """Prove in turn with one prover, as a tune does; return the results and the number of leftover processes."""
    import psutil

    from autosel.parity.check import Prover, Terms

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    terms = Terms(inputs="containment", call_deadline_s=CALL_S[fp.kind], device=scope.device)
    with Prover(fp, terms, threads=1) as prover:
        found = [prover.prove(proof) for proof in proofs]
    return found, len({p.pid for p in psutil.Process().children(recursive=True)} - before)


def free_bytes(scope: Scope) -> int:
    """Return the free memory of the device; 0 on a CPU, where an ended process holds no memory."""
    if not scope.on_gpu:
        return 0
    import torch

    return int(torch.cuda.mem_get_info(scope.device)[0])


def judged(found: Parity, expected: tuple[str, ...]) -> list[str]:
    """Return the errors in the faulty kernel's outcome."""
    if not isinstance(found, Failed):
        return ["it passed"]
    said = cause(found)
    return [] if any(word in said for word in expected) else [f"it failed with another cause: {said}"]


def cause(found: Parity) -> str:
    if not isinstance(found, Failed):
        return ""
    return f"{found.check}: {found.evidence.get('cause', '')}: {found.reason}"[:300]


def as_alone(behind: Parity, alone: Parity) -> list[str]:
    """Return the differences between the good kernel's proof after the fault and its proof alone."""

    def told(parity: Parity) -> tuple[Any, ...]:
        return (parity.cases, parity.worst, parity.worst_case) if isinstance(parity, Passed) else (cause(parity),)

    if not isinstance(alone, Passed):
        return [f"the good kernel fails alone: {cause(alone)}"]
    return [] if told(behind) == told(alone) else [f"the next gave {told(behind)}, not {told(alone)}"]


def table(found: Mapping[str, Found]) -> Table:
    rows = [
        (name, one["outcome"], one["cause"][:60], one["behind"], f"{one['took_s']:.1f}")
        for name, one in found.items()
        if "outcome" in one
    ]
    return Table(columns=("fault", "outcome", "found as", "the next one", "s"), rows=tuple(rows))
