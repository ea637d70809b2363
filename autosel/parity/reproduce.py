"""One named case alone: what an error message tells people to run."""

from __future__ import annotations

from autosel.candidates.base import Candidate
from autosel.errors import ParityError, UnknownName
from autosel.native.compile import compile_source
from autosel.ops import OPS
from autosel.parity.check import Terms, cases_of, check_all
from autosel.parity.session import Proof
from autosel.values import Failed, Fingerprint, NativeRecipe, Workload

HABITS = ("repeated calls", "a result kept across later calls", "strided outputs", "many calls", "process-wide state")


def reproduce(candidate: Candidate, w: Workload, fp: Fingerprint, case: str) -> str:
    """Build the candidate and run one hostile case on fresh inputs; a line that says how it passed.

    A name of a check over many calls, or at full size, runs the whole proof: what those find rests on what came before.
    Raises UnknownName with the names there are, BuildError, or ParityError with the values seen.
    """
    proof = built(candidate, w, fp)
    covers = {c.name: c.covers for c in cases_of(OPS[candidate.op], proof, fp)}
    whole = case in HABITS or case.startswith("fresh inputs") or case.endswith(f" at {w.shape_text}")
    if case not in covers and not whole:
        raise UnknownName("case", case, (*covers, *HABITS))
    covers.setdefault(case, "what shows over many calls, or at full size")
    found = check_all([proof], fp=fp, terms=Terms(only="" if whole else case))[0]
    if isinstance(found, Failed):
        seen = ", ".join(f"{name} {value}" for name, value in found.evidence.items() if name != "traceback")
        what = f'{candidate.name} failed parity (check "{found.check}", case "{case}")'
        raise ParityError(what, why=found.reason, todo=f"the case is there to show: {covers[case]}; seen: {seen}")
    return f'{candidate.name} passed case "{case}" ({covers[case]}): worst error {found.worst:.2f} of the bound'


def built(candidate: Candidate, w: Workload, fp: Fingerprint) -> Proof:
    """What is to be proven of a candidate at a workload, compiled if it has to be."""
    knobs = candidate.knobs(w, fp)
    recipe = candidate.recipe(w, fp, knobs)
    digest = compile_source(recipe.source, recipe.flags).digest if isinstance(recipe, NativeRecipe) else ""
    return Proof(candidate=candidate, recipe=recipe, digest=digest, knobs=knobs, workload=w)
