"""Find the ways that may race at a workload, with their knobs, and its earlier decisions."""

from __future__ import annotations

from dataclasses import replace

from autosel import settings
from autosel.candidates import arms, registry
from autosel.candidates.base import Candidate
from autosel.errors import BuildError, UsageError
from autosel.ledger.containment import Quarantine
from autosel.ledger.key import current_mode
from autosel.models.workloads import Named
from autosel.native.compile import source_digest
from autosel.tuning.job import Buildable, Job, Tuning
from autosel.values import SERVING, Accepted, Fingerprint, Knobs, NativeRecipe, Workload


def shortlist(tuning: Tuning, named: Named, *, probe: bool = False) -> Job:
    """Return the job of one workload. Its `settled` decisions, if any, need no measurement.

    Raises UsageError if the baseline cannot run the workload.
    """
    w, fp = named.workload, tuning.fp
    held, released = tuning.ledger.quarantined(fp.hw_id, w.op), tuning.ledger.released(fp.hw_id, w.op)
    offered = [_offer(tuning, w, candidate, held, released) for candidate in _eligible(tuning, w)]
    ways = [way for way in offered if way is not None]
    name = registry.baseline(w.op).name
    baseline = next((way for way in ways if way.candidate.name == name), None)
    if baseline is None:
        raise UsageError(
            f"the baseline {name} cannot run {w.key}",
            why="without a baseline no candidate can be compared",
            todo=f"run `{settings.spelling()} doctor` to see why, or exclude {w.op} with --op",
        )
    job = Job(
        named=named,
        mode=current_mode(),
        baseline=baseline,
        incumbent=baseline,
        ways=[way for way in ways if way is not baseline],
        offered=tuple(way.arm.digest for way in ways),
        probe=probe,
    )
    if not tuning.request.force and not probe:
        known = tuning.ledger.known_rows(fp.hw_id, w.bucket, job.mode, job.offered)
        last = max(way.released_at for way in ways)
        job.settled = known if all(d.state == "pinned" or d.created_at >= last for d in known) else ()
    job.incumbent = _incumbent(tuning, job)
    return job


def _eligible(tuning: Tuning, w: Workload) -> list[Candidate]:
    accepted = []
    for candidate, support in registry.eligible(w, tuning.fp, tuning.request.effort):
        if isinstance(support, Accepted):
            accepted.append(candidate)
        else:
            tuning.tally.rejected(w, candidate.name, "eligible", support.reason)
    return accepted


def _offer(
    tuning: Tuning, w: Workload, candidate: Candidate, held: dict[str, Quarantine], released: dict[str, str]
) -> Buildable | None:
    try:
        way = way_of(candidate, w, tuning.fp)
    except BuildError as error:
        tuning.tally.rejected(w, candidate.name, "build", error.what)
        return None
    quarantine = held.get(way.build_digest) or held.get(way.arm.digest)
    if quarantine is None:
        ended = max(released.get(digest, "") for digest in (way.build_digest, way.arm.digest))
        return replace(way, released_at=ended)
    tuning.tally.rejected(w, candidate.name, "quarantine", quarantine.reason, quarantine=quarantine.id)
    return None


def way_of(candidate: Candidate, w: Workload, fp: Fingerprint, knobs: Knobs | None = None) -> Buildable:
    """Derive a candidate's knobs (unless they are given), recipe and arm without building it. Raises BuildError without
    a compiler."""
    knobs = candidate.knobs(w, fp) if knobs is None else knobs
    recipe = candidate.recipe(w, fp, knobs)
    built = source_digest(recipe.source, recipe.flags) if isinstance(recipe, NativeRecipe) else ""
    arm = arms.arm(candidate, w, fp, built, knobs)
    return Buildable(candidate=candidate, knobs=knobs, recipe=recipe, build_digest=built or arm.digest, arm=arm)


def _incumbent(tuning: Tuning, job: Job) -> Buildable:
    """Return the way that serves this bucket now if it is unchanged; else the baseline."""
    for served in tuning.ledger.serving_rows(tuning.fp.hw_id, job.workload.bucket, job.mode):
        for way in job.ways:
            if way.arm.digest == served.arm.digest and served.state in SERVING:
                return way
    return job.baseline
