"""Split a bucket of lengths where its winner changes.

A bucket (2^k, 2^(k+1)] is decided at its longest context. Its other end, 2^k + 1, is one token longer than the longest
context of the bucket below. If the winner of that bucket differs, this end races too. If its winner also differs,
middle lengths race until the change is known within a ratio of 1.25.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt

from autosel.ledger.key import LengthRange
from autosel.models.workloads import Named
from autosel.tuning.contend import contend
from autosel.tuning.job import Job, Tuning
from autosel.tuning.prove import prove_all
from autosel.tuning.shortlist import shortlist
from autosel.values import Workload, length_bucket

BRACKET = 1.25  # the change is known within this ratio of lengths
STEPS = 4


def lowest_ends(named: Sequence[Named]) -> tuple[Named, ...]:
    """Return the lower end of the lowest bucket of each family of lengths. It always races: no bucket is below it."""
    lowest: dict[str, Named] = {}
    for n in named:
        if _has_length(n.workload):
            family = n.workload.at(L=1).key
            if family not in lowest or n.workload["L"] < lowest[family].workload["L"]:
                lowest[family] = n
    ends = []
    for n in lowest.values():
        low, _ = length_bucket(n.workload["L"])
        if low < n.workload["L"]:
            ends.append(replace(n, workload=n.workload.at(L=low)))
    return tuple(ends)


def may_split(job: Job) -> bool:
    """Return True if `split_buckets` decides this job, after all races."""
    return job.verdict is not None and _has_length(job.workload)


def split_buckets(tuning: Tuning, jobs: Sequence[Job]) -> Iterator[tuple[Job, LengthRange, Workload]]:
    """Yield the decisions of races over lengths: the winning job, its lengths (None: its whole bucket), its workload.

    A bucket is decided only after its split is known. Otherwise a tune that is killed in between would leave it
    unsplit for good.
    """
    raced = {job.workload.key: job for job in jobs if may_split(job)}
    winners = {key: job.winner.candidate.name for key, job in raced.items() if not _undecided(job)}
    winners |= {job.workload.key: job.settled[-1].arm.candidate for job in jobs if job.settled}
    for job in raced.values():
        if not job.probe:
            yield from list(_parts(tuning, job, raced, winners)) or [(job, None, job.workload)]


def _parts(
    tuning: Tuning, job: Job, raced: Mapping[str, Job], winners: Mapping[str, str]
) -> Iterator[tuple[Job, LengthRange, Workload]]:
    w, (low, top) = job.workload, length_bucket(job.workload["L"])
    at_low, below = w.at(L=low).key, w.at(L=low - 1).key if low > 1 else ""
    hint = winners.get(at_low) or winners.get(below)
    if not _undecided(job) and low < w["L"] and hint not in (None, job.winner.candidate.name):
        lowest = raced[at_low] if at_low in winners else _race_at(tuning, job, low)
        if lowest is not None:
            yield from _split(tuning, job, lowest, low, top)


def _split(tuning: Tuning, job: Job, below: Job, low: int, top: int) -> Iterator[tuple[Job, LengthRange, Workload]]:
    if _same(below, job):
        return
    above = job
    for _ in range(STEPS):
        if above.workload["L"] <= BRACKET * below.workload["L"]:
            break
        middle = _race_at(tuning, job, isqrt(below.workload["L"] * above.workload["L"]))
        if middle is None:
            break
        below, above = (below, middle) if _same(middle, above) else (middle, above)
    change = above.workload["L"]
    yield below, (low, change - 1), below.workload
    yield above, (change, top), above.workload


def _race_at(tuning: Tuning, job: Job, length: int) -> Job | None:
    """Race the job's workload at another length; return None if it stays undecided."""
    named = replace(job.named, workload=job.workload.at(L=length))
    extra = shortlist(tuning, named, probe=True)
    prove_all(tuning, [extra])
    if extra.late:
        return None
    for finished in contend(tuning, [extra]):
        if finished.verdict is not None and not _undecided(finished):
            return finished
    return None


def _has_length(w: Workload) -> bool:
    return w.op in ("attn", "paged_attn") and any(name == "L" for name, _ in w.dims)


def _undecided(job: Job) -> bool:
    return job.verdict is None or job.verdict.outcome == "undecided"


def _same(a: Job, b: Job) -> bool:
    return a.winner.candidate.name == b.winner.candidate.name
