"""Report software that is missing to build autosel's kernels. A GPU run without it must not look clean.

A refusal because of the device or the shape is a valid answer, not a fault; the texts of refusals tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from autosel.candidates.base import Candidate
from autosel.candidates.triton.base import NO_TRITON
from autosel.native import cuda, cutlass
from autosel.native.compile import NO_COMPILER
from autosel.values import DTypeName, Fingerprint, Rejected
from benchmarks.gpu.scope import Scope, is_ours


def lacking(candidate: Candidate, dtype: DTypeName, scope: Scope, fp: Fingerprint) -> str:
    """Return the software whose absence refuses a candidate for some workload, and how to install it; or "".

    All workloads are checked, because the first one may be refused for its shape.
    """
    if not scope.on_gpu or not is_ours(candidate.name):
        return ""
    asked = [n.workload for n in scope.everything(dtype=dtype) if n.workload.op == candidate.op]
    answers = [candidate.supports(w, fp) for w in asked]
    reasons = {answer.reason for answer in answers if isinstance(answer, Rejected)}
    return next((why for why in _missing(fp) if why in reasons), "")


def _missing(fp: Fingerprint) -> Iterator[str]:
    """Yield the exact texts with which candidates refuse for lack of a tool."""
    from autosel.knobs.gpu.facts import facts

    yield from (why for why in (cuda.why_not(facts(fp).cc), cutlass.why_not()) if why)
    yield from (NO_COMPILER, NO_TRITON)
