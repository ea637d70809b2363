"""Stage 5: kernels that fail in the three ways a device cannot undo, each contained: the next is judged as if alone.

An illegal access, a kernel that never ends, one that takes all memory (faults.cu; on a CPU faults.cpp) go on trial as
any candidate does. Each must fail by its deadline and for its own cause, its worker must be gone, the device must give
back what it held, and a good kernel on trial behind it must get the very proof that it gets alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosel.values import Failed, Fingerprint, Parity, Passed, Workload
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table

if TYPE_CHECKING:
    from autosel.parity.check import Proof

UNIT_S = 600.0
CALL_S = {"cuda": 10.0, "cpu": 4.0}  # the deadline of a call that takes microseconds, or never ends
NO_MORE_S = 120.0  # for a fault and the good kernel behind it, builds included
HELD_BYTES = 256 << 20  # of device memory: what other processes may come to hold meanwhile
HERE = Path(__file__).parent

# Entry -> what must be said of it: check, cause, or words of the reason; any of them.
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
    """Our own kernel of the same op."""
    from autosel.candidates.registry import find
    from autosel.native.compile import compile_source
    from autosel.tuning.prove import proof_of
    from autosel.tuning.shortlist import way_of
    from autosel.values import NativeRecipe

    way = way_of(find("rmsnorm", "cpp:rmsnorm" if fp.kind == "cpu" else "cuda:rmsnorm"), workload(), fp)
    assert isinstance(way.recipe, NativeRecipe)
    compile_source(way.recipe.source, way.recipe.flags)
    return proof_of(way, workload())


def faulty(entry: str, fp: Fingerprint) -> Proof:
    from autosel.candidates.user_source import UserSource
    from autosel.native.compile import compile_source
    from autosel.tuning.prove import proof_of
    from autosel.tuning.shortlist import way_of

    file = HERE / ("faults.cpp" if fp.kind == "cpu" else "faults.cu")
    way = way_of(UserSource("rmsnorm", file, entry), workload(), fp)
    compile_source(way.recipe.source, way.recipe.flags)  # type: ignore[union-attr]
    return proof_of(way, workload())


def workload() -> Workload:
    from autosel.ops import find

    return find("rmsnorm").workload("bf16", {"M": 2, "d": 1024})


def on_trial(proofs: list[Proof], fp: Fingerprint, scope: Scope) -> tuple[list[Parity], int]:
    """The proofs one after the other, as a tune has them; and how many processes were left behind."""
    import psutil

    from autosel.parity.check import Prover, Terms

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    terms = Terms(inputs="containment", call_deadline_s=CALL_S[fp.kind], device=scope.device)
    with Prover(fp, terms, threads=1) as prover:
        found = [prover.prove(proof) for proof in proofs]
    return found, len({p.pid for p in psutil.Process().children(recursive=True)} - before)


def free_bytes(scope: Scope) -> int:
    """Of the device's memory; 0 on a CPU, where a process that is gone holds nothing."""
    if not scope.on_gpu:
        return 0
    import torch

    return int(torch.cuda.mem_get_info(scope.device)[0])


def judged(found: Parity, expected: tuple[str, ...]) -> list[str]:
    """What is wrong with the faulty one's outcome."""
    if not isinstance(found, Failed):
        return ["it passed"]
    said = cause(found)
    return [] if any(word in said for word in expected) else [f"it failed for another cause: {said}"]


def cause(found: Parity) -> str:
    if not isinstance(found, Failed):
        return ""
    return f"{found.check}: {found.evidence.get('cause', '')}: {found.reason}"[:300]


def as_alone(behind: Parity, alone: Parity) -> list[str]:
    """What is wrong with the proof of the good one behind: it must be the one it gets alone, case by case."""

    def told(parity: Parity) -> tuple[Any, ...]:
        return (parity.cases, parity.worst, parity.worst_case) if isinstance(parity, Passed) else (cause(parity),)

    if not isinstance(alone, Passed):
        return [f"the good kernel fails by itself: {cause(alone)}"]
    return [] if told(behind) == told(alone) else [f"the next was judged otherwise: {told(behind)}, not {told(alone)}"]


def table(found: Mapping[str, Found]) -> Table:
    rows = [
        (name, one["outcome"], one["cause"][:60], one["behind"], f"{one['took_s']:.1f}")
        for name, one in found.items()
        if "outcome" in one
    ]
    return Table(columns=("fault", "outcome", "found as", "the next one", "s"), rows=tuple(rows))
