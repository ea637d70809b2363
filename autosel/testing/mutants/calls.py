"""Try mutants with a fault over several calls (habitual.py). A worker proves each by the checks of any candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosel.candidates.base import Candidate
from autosel.ops.contract import Op
from autosel.parity.check import Prover, Terms
from autosel.parity.session import Proof
from autosel.testing.mutants.habitual import faults
from autosel.testing.mutants.trial import plain_workload
from autosel.values import Accepted, Backend, Failed, Fingerprint, Knobs, PythonRecipe, Support, Workload

MODULE = "autosel.testing.mutants.habitual"


class Habit(Candidate):
    """An op's eager composition with a fault that shows over several calls."""

    backend: Backend = "TORCH"

    def __init__(self, op: str, fault: str) -> None:
        self.op, self.name = op, f"mutant:{fault}"
        self.target = f"{MODULE}:{op}__{fault}"

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        return Accepted()

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> PythonRecipe:
        return PythonRecipe(target=self.target)


def killers(op: Op, seed: int, *, late: bool = False, some: Sequence[str] = ()) -> Mapping[str, str]:
    """Return the check that refuses each fault (by default all faults), or "" if none does.

    `late`: also try faults after thousands of calls, with enough calls to show them.
    """
    w = plain_workload(op, "bf16", seed)
    terms = Terms(inputs=f"habits {seed}", pairs=range(40), calls=10 if late else 1)
    found: dict[str, str] = {}
    with Prover(None, terms, threads=1) as prover:
        for fault in some or faults(op, late=late):
            candidate = Habit(op.name, fault)
            recipe = PythonRecipe(target=candidate.target)
            parity = prover.prove(Proof(candidate=candidate, recipe=recipe, digest=fault, knobs=Knobs(), workload=w))
            found[fault] = parity.check if isinstance(parity, Failed) else ""
    return found
