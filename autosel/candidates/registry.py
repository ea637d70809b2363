"""All candidates of this process by op: PyTorch's, Inductor's, autosel's C++, CUDA, CUTLASS and Triton kernels, the
user's.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path

from autosel.candidates import cpp, cuda, cutlass, libraries, triton
from autosel.candidates.base import Candidate, support_of
from autosel.candidates.inductor import INDUCTOR
from autosel.candidates.plugins import load_allowed
from autosel.candidates.torch import BASELINES, TORCH
from autosel.candidates.user import from_target, registered
from autosel.candidates.user_source import from_source, is_source
from autosel.errors import UnknownName
from autosel.formats import FORMER_OPS
from autosel.values import WHOLE_STEP, Fingerprint, Rejected, Support, Workload

# same as in autosel.ops, which imports torch
ALIASES = {"gemv": "linear", "gemm": "linear", **{name: former.op for name, former in FORMER_OPS.items()}}
_BASELINE = {c.op: c for c in BASELINES}


def all_candidates(op: str) -> tuple[Candidate, ...]:
    """Return every candidate for an op, the baseline first. Raises UnknownName."""
    name = op_name(op)
    load_allowed()
    return (*(c for c in own_candidates() if c.op == name), *registered(name))


def baseline(op: str) -> Candidate:
    """Return the candidate to beat: PyTorch's eager code. Raises UnknownName."""
    return _BASELINE[op_name(op)]


def find(op: str, name: str) -> Candidate:
    """Return a candidate by its name, ignoring case. Raises UnknownName with the nearest name."""
    known = all_candidates(op)
    for candidate in known:
        if candidate.name.lower() == name.lower():
            return candidate
    raise UnknownName(f"candidate for {op}", name, tuple(c.name for c in known))


def named(op: str, target: str) -> Candidate:
    """Return a registered candidate by its name, ignoring case, else a user's.

    A user's is `module:function`, `file.py:function`, or a C++ or CUDA file. Raises UnknownName, UsageError, BadConfig.
    """
    if is_source(target):
        return from_source(target, op_name(op))
    file, _, function = target.rpartition(":")
    if file.endswith(".py"):
        path = Path(file).expanduser().resolve()
        return from_target(f"{path.stem}:{function}", op_name(op), folder=path.parent)
    known = {c.name.lower() for c in all_candidates(op)}
    families = {name.partition(":")[0] for name in known}
    if target.lower() in known or target.partition(":")[0] in families:
        return find(op, target)
    return from_target(target, op_name(op))


def eligible(w: Workload, fp: Fingerprint, effort: str = "quick") -> tuple[tuple[Candidate, Support], ...]:
    """Return each candidate of the op with its support, the baseline first. `quick` leaves out effort `full`."""
    wanted = [c for c in all_candidates(w.op) if effort == "full" or c.effort == "quick"]
    return tuple((c, _supports(c, w, fp)) for c in wanted)


def ledger_name(op: str) -> str:
    """Return `op_name`, or the whole step's name, which has no candidates. Raises UnknownName."""
    return op if op == WHOLE_STEP else op_name(op)


def op_name(op: str) -> str:
    """Return an op's own name for it or an alias (gemv, gemm). Raises UnknownName."""
    name = ALIASES.get(op, op)
    if name not in _BASELINE:
        raise UnknownName("op", op, (*_BASELINE, *ALIASES))
    return name


@cache
def own_candidates() -> tuple[Candidate, ...]:
    """Return autosel's candidates, from every module below candidates/{cpp,cuda,cutlass,triton,libraries}."""
    kernels: list[Candidate] = []
    for package in (cpp, cuda, cutlass, triton, libraries):
        for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
            kernels += getattr(import_module(f"{package.__name__}.{module}"), "KERNELS", ())
    found = (*TORCH, *kernels, *INDUCTOR)
    names = [(c.op, c.name) for c in found]
    assert len(names) == len(set(names)), (
        f"two candidates share a name: {sorted(n for n in names if names.count(n) > 1)}"
    )
    assert {c.op for c in found} <= set(_BASELINE)
    return found


def _supports(candidate: Candidate, w: Workload, fp: Fingerprint) -> Support:
    try:
        return support_of(candidate, w, fp)
    except Exception as error:  # an error in a package's Candidate excludes it, but does not stop the run
        if candidate.backend in ("TORCH", "INDUCTOR", "CPP", "CUDA_EXT", "CUTLASS", "TRITON"):
            raise
        return Rejected(reason=f"its supports() raised {type(error).__name__}: {error}")
