"""The control of a failed proof: a new worker of the same kind calls the baseline, then an empty candidate.

Only a failure without an answer (an exception, a crash, a timeout) needs a control. A worker that has returned a wrong
result has loaded and called the candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from autosel import devices, fingerprint
from autosel.candidates import registry
from autosel.candidates.base import Accepted, Candidate, support_of
from autosel.candidates.control import empties
from autosel.errors import BuildError, WorkerError
from autosel.native.compile import EMPTY_CPP
from autosel.ops import OPS
from autosel.ops.contract import Case
from autosel.parity.session import CALL_S, PROOF_S, Proof, RefusedError, Session, built
from autosel.parity.stage import place
from autosel.values import Failed, Fingerprint, NativeRecipe, Parity, PythonRecipe, Recipe, Workload
from autosel.workers.environment import control_fault
from autosel.workers.nursery import Nursery

UNANSWERED = ("raised", "crash", "timeout")


def unanswered(parity: Parity) -> bool:
    """Return True if the candidate failed without an answer."""
    return isinstance(parity, Failed) and parity.check in UNANSWERED


def require_control(
    failed: Sequence[Proof], fp: Fingerprint | None, *, threads: int, device: str, nursery: Nursery | None
) -> None:
    """Call the controls of failed proofs in a new worker, made as theirs was. Raises EnvironmentFault if one of them
    gives no answer."""
    with _session(threads, device, nursery) as session:
        for op in dict.fromkeys(proof.candidate.op for proof in failed):
            of_op = [proof for proof in failed if proof.candidate.op == op]
            names = ", ".join(dict.fromkeys(proof.candidate.name for proof in of_op))
            recipes = [proof.recipe for proof in of_op]
            _require(session, of_op[0].workload, recipes, fp or fingerprint.take(device), names)


def require_workers(fp: Fingerprint, *, native: bool) -> None:
    """Call rmsnorm's baseline, then an empty candidate (`native`: a compiled one), in a new worker on the CPU.

    Raises EnvironmentFault if one of them gives no answer.
    """
    like = NativeRecipe(source=EMPTY_CPP, entry="") if native else PythonRecipe(target="")
    with _session(1, devices.HOST) as session:
        _require(session, OPS["rmsnorm"].workload("fp32", {"M": 1, "d": 64}), [like], fp)


@contextmanager
def _session(threads: int, device: str, nursery: Nursery | None = None) -> Iterator[Session]:
    session = Session(CALL_S, threads, device, nursery)
    try:
        session.begin(PROOF_S)
        yield session
    finally:
        session.close()


def _require(session: Session, w: Workload, recipes: Sequence[Recipe], fp: Fingerprint, failed: str = "") -> None:
    baseline = registry.baseline(w.op)
    cases = OPS[w.op].cases(w)
    case = next((c for c in cases if isinstance(support_of(baseline, c.workload, fp), Accepted)), cases[0])
    for control in (baseline, *empties(w.op, recipes)):
        try:
            _call(session, control, case, fp)
        except (WorkerError, BuildError) as error:
            raise control_fault(control.name, error, failed) from error


def _call(session: Session, control: Candidate, case: Case, fp: Fingerprint) -> None:
    """Call once. A wrong result counts as an answer."""
    proof = built(control, case.workload, fp)
    name = session.load(replace(proof, digest=proof.digest or control.name))  # the session's key is the digest
    arena = session.scratch[0]
    arena.used_bytes = 0
    placed = place(arena, OPS[control.op], case.workload, case.make(0))
    placed.fill("none")
    with suppress(RefusedError):
        session.call(name, proof, placed, "control")
