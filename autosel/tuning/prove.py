"""Compile what needs compiling, then prove every way at every workload it may race at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import as_completed

from autosel.candidates.control import CONTROL
from autosel.errors import BuildError
from autosel.guard import spot
from autosel.native.compile import require_compiler
from autosel.parity.check import Proof, Terms, check_all
from autosel.parity.control import unanswered
from autosel.tuning.builds import Builds
from autosel.tuning.job import Job, Tuning, Way
from autosel.tuning.pool import pool
from autosel.values import Failed, NativeRecipe, Parity, Passed, Workload

log = logging.getLogger(__name__)

FIRST_PAIRS = range(40)  # of an op's array: every value of every domain, and most pairs of the rarer ones
AT_ONCE = 2  # proofs; nothing is timed here, so that cores may be shared

Member = tuple[Job, Way]


def prove_all(tuning: Tuning, jobs: Sequence[Job]) -> None:
    """The proofs of each build in one task; proofs are stored as they come, and stored ones reused.

    A way that does not compile, or fails, leaves its job with the reason. The baseline is proven like the rest; if it
    fails that is reported, and it still is what must be beaten: a failing baseline does not shield itself. At the
    deadline nothing new starts, and a job with a way left unproven is late. Raises EnvironmentFault, with nothing
    recorded of the failure, if the compiler, workers or the control of a failure do not work.
    """
    groups = _groups(jobs)
    recipes = (members[0][1].recipe for members in groups)
    native = [recipe for recipe in recipes if isinstance(recipe, NativeRecipe)]
    native += spot.builds((job.workload for job in jobs), tuning.fp)  # last: nothing here waits for them
    with Builds(native, over=lambda: tuning.over) as builds, pool(AT_ONCE) as executor:
        futures = {executor.submit(_prepare, tuning, builds, members): members for members in groups}
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


def _refuse(tuning: Tuning, members: Sequence[Member], error: BuildError) -> None:
    """Ways that did not compile: recorded like failed proofs, and tried again by the next tune. Raises
    EnvironmentFault if their compiler compiles nothing."""
    recipe = members[0][1].recipe
    if isinstance(recipe, NativeRecipe):
        require_compiler(recipe.source, error)
    evidence = {"why": error.why, "log": error.log, "retryable": True}
    failed = Failed(check="build", case="compile", evidence=evidence, reason=error.what)
    for job, way in members:
        job.parities.append((way.arm, failed))
        tuning.ledger.save_parity(tuning.fp.hw_id, job.workload, way.arm, failed)
        tuning.tally.rejected(job.workload, way.candidate.name, "build", f"{error.what}: {error.why}")
        job.drop(way)


def _groups(jobs: Sequence[Job]) -> list[list[Member]]:
    """The ways of one process each; PyTorch's first, for they take longest and need no compiler."""
    groups: dict[str, list[Member]] = {}
    for job in jobs:
        for way in [job.baseline, *job.ways]:
            groups.setdefault(process_of(way), []).append((job, way))
    return sorted(groups.values(), key=lambda members: members[0][1].arm.backend != "TORCH")


def process_of(way: Way) -> str:
    """A build gets a process of its own; PyTorch's own ways are one build, in two processes: attention takes as long
    as all the rest."""
    if way.arm.backend in ("TORCH", "INDUCTOR"):
        return f"{way.arm.backend} {'attention' if 'attn' in way.candidate.op else ''}"
    return way.build_digest


def _prepare(tuning: Tuning, builds: Builds, members: Sequence[Member]) -> list[Parity]:
    """Have the group's recipe compiled, then prove what the ledger does not know yet; nothing where the time was over
    before it began. Raises BuildError."""
    way = members[0][1]
    if tuning.over:
        return []
    if isinstance(way.recipe, NativeRecipe):
        tuning.tally.stage("parity", f"compiling {way.recipe.source}", 0, 0)
        if builds.wait(way.recipe) is None:
            return []
    known = [_known(tuning, job, way) for job, way in members]
    missing = [member for member, parity in zip(members, known, strict=True) if parity is None]
    if missing and tuning.clock() > tuning.deadline:  # a compiler may have taken the rest
        return []
    tuning.tally.stage("parity", way.candidate.name, 0, 0)
    found = iter(_on_trial(tuning, missing) if missing else [])
    for index, (job, way) in enumerate(members):
        if known[index] is None:
            known[index] = parity = next(found)
            tuning.ledger.save_parity(tuning.fp.hw_id, job.workload, way.arm, parity)
    return [parity for parity in known if parity is not None]


def _on_trial(tuning: Tuning, members: Sequence[Member]) -> list[Parity]:
    """Run the proofs of one build; the ledger keeps who was running, should this process or the machine not survive it.
    PyTorch's own ways are not journaled: the baseline, one of them, can never be held back."""
    proofs = [proof_of(way, job.workload) for job, way in members]
    way = members[0][1]
    request = tuning.request
    terms = Terms(call_deadline_s=request.call_deadline_s, device=request.device, pairs=FIRST_PAIRS)
    if way.arm.backend == "TORCH":
        return check_all(proofs, fp=tuning.fp, terms=terms)
    with tuning.ledger.trial(tuning.fp.hw_id, way.candidate.op, way.arm):
        return check_all(proofs, fp=tuning.fp, terms=terms)


def _known(tuning: Tuning, job: Job, way: Way) -> Parity | None:
    """What the ledger knows and still holds. A proof of an earlier version, without pairs of values, is made again. A
    failure is tried again with `force`, if it was for want of memory or the like, if its quarantine was ended since, or
    if no control was run after it: earlier versions recorded failures of the environment too."""
    known = tuning.ledger.parity_known(tuning.fp.hw_id, way.arm.digest, job.workload, since=way.released_at)
    if not isinstance(known, Failed):
        return known if known is not None and known.pairs else None
    uncontrolled = unanswered(known) and CONTROL not in known.evidence
    return None if tuning.request.force or known.evidence.get("retryable") or uncontrolled else known


def proof_of(way: Way, w: Workload) -> Proof:
    return Proof(candidate=way.candidate, recipe=way.recipe, digest=way.build_digest, knobs=way.knobs, workload=w)


def _take(tuning: Tuning, job: Job, way: Way, parity: Parity) -> None:
    job.parities.append((way.arm, parity))
    if isinstance(parity, Passed):
        return
    reason = f"{parity.check} ({parity.case}): {parity.reason}"
    tuning.tally.rejected(job.workload, way.candidate.name, "parity", reason)
    if way is job.baseline:
        log.warning("the baseline itself fails parity at %s: %s", job.workload.key, parity.reason)
    else:
        job.drop(way)
