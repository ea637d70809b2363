"""Parity of every way at every workload it may race at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import as_completed

from autosel.parity.check import Proof, check_all
from autosel.tuning.build import drop
from autosel.tuning.job import Job, Tuning, Way
from autosel.tuning.pool import pool
from autosel.values import Parity, Passed, Workload

log = logging.getLogger(__name__)

PROVERS = 2

Member = tuple[Job, Way]


def prove_all(tuning: Tuning, jobs: Sequence[Job]) -> None:
    """Proofs are stored as they come, and stored ones reused; a way that fails leaves its job, with the reason.

    One process a build covers all its workloads. The baseline is proven like the rest; if it fails that is reported,
    and it still is what must be beaten: a failing baseline does not shield itself. At the deadline no proof starts, and
    a job with a way left unproven is late.
    """
    groups = _unproven(tuning, jobs)
    with pool(PROVERS) as executor:
        futures = {executor.submit(_prove, tuning, members): members for members in groups.values()}
        if groups:
            tuning.tally.stage("parity", next(iter(groups.values()))[0][1].candidate.name, 0, len(groups))
        for done, future in enumerate(as_completed(futures), 1):
            members = futures[future]
            proofs = future.result()
            for job, _ in members if not proofs else ():
                job.late = True
            for (job, way), parity in zip(members, proofs, strict=False):
                tuning.ledger.save_parity(tuning.fp.hw_id, job.workload, way.arm, parity)
                _take(tuning, job, way, parity)
            tuning.tally.stage("parity", members[0][1].candidate.name, done, len(groups))


def _unproven(tuning: Tuning, jobs: Sequence[Job]) -> dict[str, list[Member]]:
    groups: dict[str, list[Member]] = {}
    for job in jobs:
        for way in [job.baseline, *job.ways]:
            known = tuning.ledger.parity_known(tuning.fp.hw_id, way.arm.digest, job.workload)
            if known is None:
                groups.setdefault(_process_of(way), []).append((job, way))
            else:
                _take(tuning, job, way, known)
    return groups


def _process_of(way: Way) -> str:
    """A build gets a process of its own; PyTorch's own ways are one build, in two processes: attention takes as long
    as all the rest."""
    if way.arm.backend in ("TORCH", "INDUCTOR"):
        return f"{way.arm.backend} {'attention' if 'attn' in way.candidate.op else ''}"
    return way.build_digest


def _prove(tuning: Tuning, members: Sequence[Member]) -> list[Parity]:
    """Nothing where the time was over before it began."""
    if tuning.over:
        return []
    return check_all([proof_of(way, job.workload) for job, way in members], fp=tuning.fp)


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
        drop(job, way)
