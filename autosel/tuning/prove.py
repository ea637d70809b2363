"""Compile every way, then prove it at every workload where it may race."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext

from autosel.candidates.base import Candidate
from autosel.candidates.control import CONTROL
from autosel.errors import BuildError
from autosel.guard import spot
from autosel.ledger.commands import SaveParity
from autosel.ledger.store import Ledger
from autosel.native.compile import require_compiler
from autosel.parity.check import Proof, Terms, check_all
from autosel.parity.control import unanswered
from autosel.parity.session import nursery
from autosel.tuning.builds import Builds
from autosel.tuning.job import Buildable, Job, Tuning
from autosel.values import Arm, Failed, Knob, Knobs, NativeRecipe, Parity, Passed, Workload
from autosel.workers.nursery import Nursery

FIRST_PAIRS = range(40)  # rows of an op's array: every value of every domain, and most pairs of the rarer ones
AT_ONCE = 2  # proofs at once; they may share cores, because they are not timed

JobBuild = tuple[Job, Buildable]


def prove_all(tuning: Tuning, jobs: Sequence[Job]) -> None:
    """Prove all ways, with all proofs of a build in one task; store each proof on completion, and reuse stored ones.

    A way that does not compile, or fails, is dropped from its job with the reason. A baseline that fails is reported
    and stays the baseline, because it is what runs without autosel. After the deadline no more proofs start, and a job
    with an unproven way is late. Raises EnvironmentFault, and records no failure, if the compiler, the workers or the
    control of a failure do not work.
    """
    groups = _groups(jobs)
    if groups:
        tuning.tally.stage("parity", "", 0, len(groups))
    recipes = (members[0][1].recipe for members in groups)
    native = [recipe for recipe in recipes if isinstance(recipe, NativeRecipe)]
    native += spot.builds((job.workload for job in jobs), tuning.fp)  # last, because no proof waits for them
    with nursery() as workers, Builds(native, over=lambda: tuning.over) as builds, _pool() as executor:
        futures = {executor.submit(_prepare, tuning, builds, workers, members): members for members in groups}
        for done, future in enumerate(as_completed(futures), 1):
            members = futures[future]
            try:
                parities = future.result()
            except BuildError as error:
                _refuse(tuning, members, error)
                continue
            for job, _ in members if not parities else ():
                job.late = True
            for (job, way), parity in zip(members, parities, strict=False):
                _take(tuning, job, way, parity)
            tuning.tally.stage("parity", members[0][1].candidate.name, done, len(groups))


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Yield an executor for AT_ONCE proofs. After an exception (Ctrl-C), do not wait for it: workers end with this
    process."""
    executor = ThreadPoolExecutor(max_workers=AT_ONCE)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _refuse(tuning: Tuning, members: Sequence[JobBuild], error: BuildError) -> None:
    """Record ways that did not compile as failed proofs, which the next tune tries again.

    Raises EnvironmentFault if the compiler cannot compile an empty source either.
    """
    recipe = members[0][1].recipe
    if isinstance(recipe, NativeRecipe):
        require_compiler(recipe.source, error)
    evidence = {"why": error.why, "log": error.log, "retryable": True}
    failed = Failed(check="build", case="compile", evidence=evidence, reason=error.what)
    for job, way in members:
        job.parities.append((way.arm, failed))
        tuning.ledger.write(SaveParity(hw_id=tuning.fp.hw_id, workload=job.workload, arm=way.arm, parity=failed))
        tuning.tally.rejected(job.workload, way.candidate.name, "build", f"{error.what}: {error.why}")
        job.drop(way)


def _groups(jobs: Sequence[Job]) -> list[list[JobBuild]]:
    """Return the ways of each process. PyTorch's come first: they take longest and need no compiler."""
    groups: dict[str, list[JobBuild]] = {}
    for job in jobs:
        for way in [job.baseline, *job.ways]:
            groups.setdefault(process_of(way), []).append((job, way))
    return sorted(groups.values(), key=lambda members: members[0][1].arm.backend != "TORCH")


def process_of(way: Buildable) -> str:
    """Return the process of a way: one for each build, and two for PyTorch's ways, one of them for attention.

    Proofs of attention take as long as those of all other ops together.
    """
    if way.arm.backend in ("TORCH", "INDUCTOR"):
        return f"{way.arm.backend} {'attention' if 'attn' in way.candidate.op else ''}"
    return way.build_digest


def _prepare(tuning: Tuning, builds: Builds, workers: Nursery, members: Sequence[JobBuild]) -> list[Parity]:
    """Compile the group's recipe, then run the proofs that the ledger does not have; return all parities.

    Return [] if the time was over before the proofs started. Raises BuildError.
    """
    way = members[0][1]
    if tuning.over:
        return []
    if isinstance(way.recipe, NativeRecipe):
        tuning.tally.stage("parity", f"compiling {way.recipe.source}", 0, 0)
        if builds.wait(way.recipe) is None:
            return []
    known = [_known(tuning, job, way) for job, way in members]
    missing = [member for member, parity in zip(members, known, strict=True) if parity is None]
    if missing and tuning.clock() > tuning.deadline:  # a compiler may have used up the time
        return []
    tuning.tally.stage("parity", way.candidate.name, 0, 0)
    found = iter(_proven(tuning, workers, missing) if missing else [])
    for index, (job, way) in enumerate(members):
        if known[index] is None:
            known[index] = parity = next(found)
            tuning.ledger.write(SaveParity(hw_id=tuning.fp.hw_id, workload=job.workload, arm=way.arm, parity=parity))
    return [parity for parity in known if parity is not None]


def _proven(tuning: Tuning, workers: Nursery, members: Sequence[JobBuild]) -> list[Parity]:
    """Run the proofs of one build."""
    proofs = [proof_of(way, job.workload) for job, way in members]
    way, request = members[0][1], tuning.request
    terms = Terms(call_deadline_s=request.call_deadline_s, device=request.device, pairs=FIRST_PAIRS)
    with on_trial(tuning.ledger, tuning.fp.hw_id, way.candidate.op, way.arm):
        return check_all(proofs, fp=tuning.fp, terms=terms, nursery=workers)


def on_trial(ledger: Ledger, hw_id: str, op: str, arm: Arm) -> AbstractContextManager[object]:
    """Record that the arm runs, in case this process or the machine crashes.

    PyTorch's arms are not recorded: the baseline is one of them and is never quarantined.
    """
    return nullcontext() if arm.backend == "TORCH" else ledger.trial(hw_id, op, arm)


def _known(tuning: Tuning, job: Job, way: Buildable) -> Parity | None:
    """Return the parity in the ledger if it is still valid, else None.

    A proof of an earlier version, without pairs of values, is repeated. A failure is repeated with `force`, if its
    cause may have passed (such as a lack of memory), if its quarantine has ended since, or if no control ran after it,
    because earlier versions also recorded failures of the environment.
    """
    known = tuning.ledger.parity_known(tuning.fp.hw_id, way.arm.digest, job.workload, since=way.released_at)
    if not isinstance(known, Failed):
        return known if known is not None and known.pairs else None
    uncontrolled = unanswered(known) and CONTROL not in known.evidence
    return None if tuning.request.force or known.evidence.get("retryable") or uncontrolled else known


def proof_of(way: Buildable, w: Workload) -> Proof:
    return Proof(candidate=way.candidate, recipe=way.recipe, digest=way.build_digest, knobs=way.knobs, workload=w)


def proof_of_raced(candidate: Candidate, arm: Arm, w: Workload) -> Proof:
    """Return the proof of an arm in the ledger, by its own recipe, build and knobs."""
    digest = arm.build or arm.digest
    return Proof(candidate=candidate, recipe=arm.recipe, digest=digest, knobs=knobs_of(arm), workload=w)


def knobs_of(arm: Arm) -> Knobs:
    return Knobs(settings=tuple(Knob(name=n, value=v, formula="as raced", inputs={}) for n, v in arm.knobs.items()))


def _take(tuning: Tuning, job: Job, way: Buildable, parity: Parity) -> None:
    job.parities.append((way.arm, parity))
    if isinstance(parity, Passed):
        return
    stage = "baseline" if way is job.baseline else "parity"
    where = " at ".join(filter(None, (parity.case, parity.evidence.get("shape"))))
    reason = f"{parity.check} ({where}): {parity.reason}"
    tuning.tally.rejected(job.workload, way.candidate.name, stage, reason)
    if way is not job.baseline:
        job.drop(way)
