"""Run one named case alone, for the command that an error message recommends."""

from __future__ import annotations

from autosel.candidates.base import Candidate
from autosel.errors import ParityError, UnknownName
from autosel.parity.battery import FRESH
from autosel.parity.check import Prover, Terms, torch_threads
from autosel.parity.session import built
from autosel.values import Failed, Fingerprint, Workload


def reproduce(candidate: Candidate, w: Workload, fp: Fingerprint, case: str, inputs: str, device: str = "cpu") -> str:
    """Build the candidate and run one case on inputs drawn from the text `inputs`; return a line about its success.

    Raises UnknownName with the known names, BuildError, or ParityError with the values.
    """
    proof = built(candidate, w, fp)
    with Prover(fp, Terms(inputs=inputs, device=device), threads=torch_threads([proof])) as prover:
        steps = {step.name: step for step in prover.steps(proof)}
        step = steps.get(_step_of(case, w))
        if step is None:
            raise UnknownName("case", case, tuple(steps))
        found = prover.take(proof, [step])
    if isinstance(found, Failed):
        what = f'{candidate.name} failed parity (check "{found.check}", case "{case}")'
        raise ParityError(what, why=found.reason, todo=f"this case covers: {step.covers}; found: {seen(found)}")
    return f'{candidate.name} passed case "{case}" ({step.covers}): worst error {found.worst:.2f} of the bound'


def _step_of(case: str, w: Workload) -> str:
    """Return the name of the step that makes the call which a failure names."""
    if case.endswith(f" at {w.shape_text}"):
        return f"at {w.shape_text}"
    return FRESH if case.startswith(FRESH) else case


def seen(failed: Failed) -> str:
    """Return the values of a failure in one line."""
    return ", ".join(
        f"{name} {value}" for name, value in failed.evidence.items() if name not in ("traceback", "stderr")
    )
