"""What is missing here to build a kernel of ours: on a GPU a run without it has shown nothing, and must not look clean.

A kernel that is not for a device or a shape says so too, in the same words of a refusal: those are answers, not faults.
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
    """What keeps a candidate of ours from being built for some workload of the scope, and what to install; "" if
    nothing does. Every workload is asked: the first may be refused for its shape."""
    if not scope.on_gpu or not is_ours(candidate.name):
        return ""
    asked = [n.workload for n in scope.everything(dtype=dtype) if n.workload.op == candidate.op]
    answers = [candidate.supports(w, fp) for w in asked]
    reasons = {answer.reason for answer in answers if isinstance(answer, Rejected)}
    return next((why for why in _missing(fp) if why in reasons), "")


def _missing(fp: Fingerprint) -> Iterator[str]:
    """The very words with which candidates refuse for a tool."""
    from autosel.knobs.gpu.facts import facts

    yield from (why for why in (cuda.why_not(facts(fp).cc), cutlass.why_not()) if why)
    yield from (NO_COMPILER, NO_TRITON)
