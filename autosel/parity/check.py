"""Prove that a built candidate meets its op's bound. One worker proves all workloads of a build.

Inputs are drawn from seeds that no candidate can know. References are computed in this process, after the candidate
has returned. A candidate that crashes, hangs or raises fails, unless the control fails too (control.py). A candidate
with correct values also fails if it reads or writes outside its operands, changes an earlier result or leaks memory.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autosel import devices
from autosel.candidates.base import support_of
from autosel.candidates.control import CONTROL, WORKED
from autosel.errors import WorkerError
from autosel.ops import OPS
from autosel.ops.array import Array
from autosel.ops.contract import Case, Op
from autosel.ops.one_thread import one_thread
from autosel.parity import calls
from autosel.parity.battery import MANY_CALLS, STATE, Battery, Tally
from autosel.parity.control import require_control, unanswered
from autosel.parity.fullsize import FullSize
from autosel.parity.session import CALL_S, PROOF_S, Proof, RefusedError, Session
from autosel.parity.truth import Truths
from autosel.values import Accepted, Failed, Fingerprint, Parity, Passed, Workload
from autosel.workers import Exit, RaisedError
from autosel.workers.nursery import Nursery

INPUTS = secrets.token_hex(8)  # one per process: all candidates of a tune get the same inputs, and none can know them
EVERY_PAIR = range(1 << 20)
ORDINARY_BYTES, CHEAP_BYTES = 16 << 10, 1 << 10
HABITS = MANY_CALLS | calls.HABITS  # checks that need several calls: the faults that each finds
_TRUTHS = Truths()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Settings of a proof: its inputs, its extent, its deadlines (of one call, of the whole proof) and its device.

    `inputs`: the text from which all inputs are drawn, by default this process's secret. `pairs`: the rows of the op's
    array (ops/array.py) to run. `traits`: also vary the workload's traits, as far as the candidate supports others.
    `calls`: how many thousands of calls are made to find a fault that occurs in one call of many.
    """

    inputs: str = INPUTS
    pairs: range = EVERY_PAIR
    traits: bool = False
    calls: int = 1
    call_deadline_s: float = CALL_S
    proof_deadline_s: float = PROOF_S
    device: str = devices.HOST

    @property
    def seed(self) -> Callable[[str], int]:
        """Return a function that gives a seed for the name of each draw: the same text gives the same inputs."""
        key = self.inputs.encode()[:64]

        def seed(what: str) -> int:
            return int.from_bytes(hashlib.blake2b(what.encode(), key=key, digest_size=3).digest(), "little")

        return seed


def check(
    proof: Proof,
    *,
    fp: Fingerprint | None = None,
    inputs: str = INPUTS,
    call_deadline_s: float = CALL_S,
    device: str = devices.HOST,
) -> Parity:
    """Prove one candidate at one workload."""
    return check_all([proof], fp=fp, terms=Terms(inputs=inputs, call_deadline_s=call_deadline_s, device=device))[0]


def check_all(
    proofs: Sequence[Proof],
    *,
    fp: Fingerprint | None = None,
    terms: Terms | None = None,
    nursery: Nursery | None = None,
) -> list[Parity]:
    """Run the proofs of one build in order; return a parity for each. With `fp`, leave out unsupported cases.

    `nursery`: the process that forks their workers.

    Raises EnvironmentFault if a worker does not start, or if the control of a failure fails: parity is then unknown.
    """
    terms, threads = terms or Terms(), torch_threads(proofs)
    with Prover(fp, terms, threads=threads, nursery=nursery) as prover:
        found = [prover.prove(proof) for proof in proofs]
    failed = [proof for proof, parity in zip(proofs, found, strict=True) if unanswered(parity)]
    if failed:
        require_control(failed, fp, threads=threads, device=terms.device, nursery=nursery)
    return [_controlled(parity) for parity in found]


def check_rest(
    proof: Proof, known: Passed, *, fp: Fingerprint | None, terms: Terms, nursery: Nursery | None = None
) -> Parity:
    """Run the rows `terms.pairs` of the array, which an earlier proof left out; return that proof with them added.

    Raises EnvironmentFault as `check_all` does.
    """
    threads = torch_threads([proof])
    with Prover(fp, terms, threads=threads, nursery=nursery) as prover:
        found = prover.rest(proof)
    if unanswered(found):
        require_control([proof], fp, threads=threads, device=terms.device, nursery=nursery)
    if isinstance(found, Failed):
        return _controlled(found)
    better, cases = known.worst > found.worst, known.cases + found.cases
    worst, case = (known.worst, known.worst_case) if better else (found.worst, found.worst_case)
    return replace(known, cases=cases, worst=worst, worst_case=case, pairs=known.pairs_of)


def _controlled(parity: Parity) -> Parity:
    """Return the parity; the evidence of a failure without an answer records that the control has worked since."""
    if isinstance(parity, Failed) and unanswered(parity):
        return replace(parity, evidence={**parity.evidence, CONTROL: WORKED})
    return parity


def torch_threads(proofs: Sequence[Proof]) -> int:
    """Return 1 for PyTorch's eager code and for our C++ kernels, else 0 for PyTorch's default number of threads.

    A parallel region of PyTorch leaves threads spinning for milliseconds after each of thousands of tiny calls. C++
    kernels run on autosel's own threads in a worker.
    """
    return 1 if all(p.candidate.backend in ("TORCH", "CPP") for p in proofs) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part of a proof, independent of the others.

    `covers`: the faults that only this step detects. Proofs of one build share the outcome of steps with the same
    `key`; "" is never shared. `draw` prepares inputs while the worker imports.
    """

    name: str
    covers: str
    workload: Workload
    run: Callable[[Battery, Tally], None]
    key: str = ""
    draw: Callable[[], None] = lambda: None


class Prover:
    """A worker and the proofs that run in it. A new worker replaces it if a failed proof may affect the next one.

    Outcomes of steps with the same knobs are reused.
    """

    def __init__(
        self, fp: Fingerprint | None, terms: Terms, *, threads: int = 0, nursery: Nursery | None = None
    ) -> None:
        """`threads`: number of PyTorch's threads in the worker; 0: its default. `nursery`: what forks it."""
        self.fp, self.terms, self.threads, self.nursery = fp, terms, threads, nursery
        self.session: Session | None = self._new_session()
        self.known: dict[tuple[str, str], Tally | RefusedError] = {}
        self._pairs: dict[tuple[str, Workload], list[Case]] = {}

    def prove(self, proof: Proof) -> Parity:
        """Run all steps up to the first that fails. The parity says which rows of the array have run."""
        found = self.take(proof, self.steps(proof))
        if isinstance(found, Failed):
            return found
        rows = len(self._pairs_of(proof))
        return replace(
            found,
            pairs=len(range(rows)[self.terms.pairs.start : self.terms.pairs.stop]),
            pairs_of=rows,
            inputs=self.terms.inputs,
        )

    def rest(self, proof: Proof) -> Parity:
        """Run only the rows of the array."""
        return self.take(proof, self._rows(proof))

    def take(self, proof: Proof, steps: Sequence[Step]) -> Parity:
        """Run these steps of a proof."""
        started, session, tally = time.monotonic(), self._started(), Tally()
        try:
            with one_thread():
                self._take(session, proof, steps, tally)
        except RefusedError as refused:
            found: Parity = Failed(
                check=refused.check, case=refused.case, evidence=plain(refused.evidence), reason=refused.reason
            )
        except WorkerError as error:
            found = _fallen(error, session.case)
        else:
            found = Passed(cases=tally.cases, worst=tally.worst, worst_case=tally.worst_case)
        if isinstance(found, Failed) and self._spoiled(session, found):
            self.close()
        return replace(found, seconds=time.monotonic() - started)

    def steps(self, proof: Proof) -> list[Step]:
        """Return the steps of a proof in order: hostile inputs, many calls, array rows and full size.

        Steps that compare the process-wide state come between them.
        """
        op, w = OPS[proof.candidate.op], proof.workload
        cases = cases_of(op, proof, self.fp)
        left = Step(name=STATE, covers=HABITS[STATE], workload=w, run=lambda battery, _: battery.state())
        steps = [_hostile(c) for c in cases]
        if cases:
            interpreted = proof.candidate.backend in devices.named(self.terms.device).interpreted
            steps += [left, *_habits(proof, cases, interpreted=interpreted)]
        full = FullSize(op, w, self.terms.seed)
        covers = "the workload at full size: sampled rows, fresh inputs, a needle"
        size = Step(name=f"at {w.shape_text}", covers=covers, workload=w, run=full.check, draw=full.draw)
        return [*steps, left, *self._rows(proof), size, left]  # report a changed process before the change crashes it

    def _rows(self, proof: Proof) -> list[Step]:
        return [_hostile(c) for c in self._pairs_of(proof)[self.terms.pairs.start : self.terms.pairs.stop]]

    def _pairs_of(self, proof: Proof) -> list[Case]:
        """Return all rows of the array; workloads that differ only in sizes share them."""
        op = OPS[proof.candidate.op]
        shared = (proof.candidate.name, proof.workload.at(**dict.fromkeys(op.dim_names, 1)))
        if shared not in self._pairs:
            self._pairs[shared] = pairs_of(op, proof, self.fp, self.terms)
        return self._pairs[shared]

    def _started(self) -> Session:
        if self.session is None:
            self.session = self._new_session()
        return self.session

    def _new_session(self) -> Session:
        return Session(self.terms.call_deadline_s, self.threads, self.terms.device, self.nursery)

    def _take(self, session: Session, proof: Proof, steps: Sequence[Step], tally: Tally) -> None:
        for step in steps:
            step.draw()
        session.begin(self.terms.proof_deadline_s)
        terms = self.terms
        battery = Battery(session, proof, OPS[proof.candidate.op], _TRUTHS, terms.seed, calls=terms.calls)
        for step in steps:
            self._once(battery, step, tally)

    def _spoiled(self, session: Session, failed: Failed) -> bool:
        """Return True if the worker has ended, or if this failure may have left changes that affect the next proof."""
        if session.worker.exit is not None or failed.check in ("guards", "leak", "raised"):
            return True
        try:
            return bool(session.changed())
        except WorkerError:
            return True

    def _once(self, battery: Battery, step: Step, tally: Tally) -> None:
        """Run a step, or reuse its outcome: workloads of one build share most cases."""
        if not step.key:
            step.run(battery, tally)
            return
        key = (battery.name, step.key)
        if key not in self.known:
            own = Tally()
            try:
                step.run(battery, own)
            except RefusedError as refused:
                refused.evidence = {**refused.evidence, "shape": step.workload.shape_text}
                self.known[key] = refused
                raise
            self.known[key] = own
        known = self.known[key]
        if isinstance(known, RefusedError):
            raise known
        tally.merge(known)

    def close(self) -> Exit | None:
        """End the worker and everything it started; return how it ended, or None if none runs."""
        session, self.session = self.session, None
        return session.close() if session is not None else None

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hostile(case: Case) -> Step:
    return Step(
        name=case.name,
        covers=case.covers,
        workload=case.workload,
        run=lambda battery, tally: battery.hostile(case, tally),
        key=f"{case.name} {case.workload.key}",
    )


@lru_cache(maxsize=64)
def _array(op: Op, like: Workload, seed: int, *, traits: bool, sizes: bool) -> Array:
    return Array(op, like, seed, traits=traits, sizes=sizes)


def pairs_of(op: Op, proof: Proof, fp: Fingerprint | None, terms: Terms) -> list[Case]:
    """Return the rows of the op's array, the same for all workloads of a build.

    A candidate that compiles for each shape runs them at one small shape.
    """
    static, w = proof.candidate.static_shapes, proof.workload

    def accepts(at: Workload) -> bool:
        """Return True if the candidate supports this workload with the same build."""
        if fp is None:
            return True
        accepted = isinstance(support_of(proof.candidate, at, fp), Accepted)
        return accepted and proof.candidate.recipe(at, fp, proof.knobs) == proof.recipe

    small = cases_of(op, proof, fp)[:1]
    like = small[0].workload if static and small else w.at(**dict.fromkeys(op.dim_names, 1))
    array = _array(op, like, terms.seed(f"array {op.name}"), traits=terms.traits and not static, sizes=not static)
    return array.cases(accepts)


def _habits(proof: Proof, cases: Sequence[Case], *, interpreted: bool = False) -> list[Step]:
    """Return the steps that need many calls of one case, with calls at another shape in between.

    With an interpreter they use the smallest case: a larger one takes seconds per call.
    """
    plain = smallest_case(cases) if interpreted else ordinary(cases)
    kind = f"{proof.workload.dtype} {proof.workload.traits}"
    apart = None if proof.candidate.static_shapes else far_case(cases)
    large = plain if interpreted else large_case(OPS[proof.candidate.op], cases)
    cheap = plain if interpreted else cheap_case(cases)

    def step(name: str) -> Step:
        def run(battery: Battery, tally: Tally) -> None:
            of_callers = calls.Calls(battery, plain, large).checks()
            found = (battery.habits(plain, cases[len(cases) // 2], cheap, apart) | of_callers).get(name)
            if found is not None:
                found(tally)

        return Step(name=name, covers=HABITS[name], workload=plain.workload, run=run, key=f"{name} {kind}")

    return [step(name) for name in HABITS if name != STATE]


def smallest_case(cases: Sequence[Case]) -> Case:
    return min(_random(cases), key=lambda c: OPS[c.workload.op].bytes_moved(c.workload))


def cheap_case(cases: Sequence[Case]) -> Case:
    """Return the smallest random case that moves at least CHEAP_BYTES."""
    enough = [c for c in _random(cases) if OPS[c.workload.op].bytes_moved(c.workload) >= CHEAP_BYTES]
    return smallest_case(enough or cases)


def _random(cases: Sequence[Case]) -> Sequence[Case]:
    return [c for c in cases if c.name.startswith("random ")] or cases[:1]


def ordinary(cases: Sequence[Case]) -> Case:
    """Return the random case closest to ORDINARY_BYTES: short calls, but no operand of a single number."""
    random = _random(cases)
    return min(random, key=lambda c: abs(math.log2(OPS[c.workload.op].bytes_moved(c.workload) / ORDINARY_BYTES)))


def large_case(op: Op, cases: Sequence[Case]) -> Case:
    """Return the random case that moves the most bytes: its calls take long enough to overlap."""
    return max(_random(cases), key=lambda c: op.bytes_moved(c.workload))


def far_case(cases: Sequence[Case]) -> Case | None:
    """Return the case with a distance between rows, or between pages of a cache, which may be of any length."""
    return next((c for c in reversed(cases) if c.name.startswith(("strided rows", "k and v share pages"))), None)


def cases_of(op: Op, proof: Proof, fp: Fingerprint | None) -> list[Case]:
    """Return the hostile cases that the candidate supports.

    A candidate that compiles for each shape runs one small shape with every hostile value and layout. The proof of its
    own shape covers no other.
    """
    cases = list(op.cases(proof.workload))
    if fp is not None:
        cases = [c for c in cases if isinstance(support_of(proof.candidate, c.workload, fp), Accepted)]
    if proof.candidate.static_shapes and cases:
        commonest, _ = Counter(c.workload for c in cases).most_common(1)[0]
        cases = [c for c in cases if c.workload == commonest]
    return cases


def plain(value: Any) -> Any:
    """Return evidence as canonical JSON: numbers that JSON cannot hold become text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 2**53 else str(value)
    return value


def _fallen(error: WorkerError, case: str) -> Failed:
    """Return the failure of a candidate whose worker did not answer, with the worker's cause as the reason."""
    evidence: dict[str, Any] = {"cause": error.cause, "retryable": error.retryable}
    if isinstance(error, RaisedError):
        evidence |= {"type": error.kind, "message": error.message, "traceback": error.traceback}
        return Failed(check="raised", case=case, evidence=evidence, reason=f"{error.kind}: {error.message}")
    evidence["stderr"] = error.why
    check = "timeout" if error.cause.startswith("timeout") else "crash"
    return Failed(check=check, case=case, evidence=evidence, reason=error.what)


__all__ = ["Proof", "Prover", "Step", "Terms", "check", "check_all"]
