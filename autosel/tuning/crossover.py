"""Length buckets are raced at both ends; where the winners differ, the bucket is split where the winner changes.

A bucket (2^k, 2^(k+1)] is decided at its longest context. Its other end, 2^k + 1, lies one token past the longest
context of the bucket below, whose winner is the first hint; only if that hint differs is the end itself raced, and then
the middle, until the change is bracketed within a quarter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt

from autosel.models.workloads import Named
from autosel.tuning.contend import contend
from autosel.tuning.job import Job, Tuning
from autosel.tuning.prove import prove_all
from autosel.tuning.shortlist import shortlist
from autosel.values import Workload, length_bucket

BRACKET = 1.25  # the change is known to within this ratio of lengths
STEPS = 4


def lowest_ends(named: Sequence[Named]) -> tuple[Named, ...]:
    """The lower end of the lowest bucket of each family of lengths: raced with the rest, for nothing lies below it."""
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


def split_buckets(tuning: Tuning, jobs: Sequence[Job]) -> Iterator[tuple[Job, tuple[int, int], Workload]]:
    """For each part of a split bucket: the job whose winner serves, the lengths it serves, its workload."""
    raced = {job.workload.key: job for job in jobs if job.verdict is not None and _has_length(job.workload)}
    for job in raced.values():
        if job.probe or _undecided(job):
            continue
        low, top = length_bucket(job.workload["L"])
        hint = _hint(raced, job.workload, low)
        if hint is None or _undecided(hint) or _same(hint, job) or low >= job.workload["L"]:
            continue
        yield from _split(tuning, job, hint, low, top)


def _hint(raced: Mapping[str, Job], w: Workload, low: int) -> Job | None:
    return raced.get(w.at(L=low).key) or raced.get(w.at(L=low - 1).key)


def _split(tuning: Tuning, job: Job, hint: Job, low: int, top: int) -> Iterator[tuple[Job, tuple[int, int], Workload]]:
    below = hint if hint.workload["L"] == low else _race_at(tuning, job, low)
    if below is None or _same(below, job):
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
    """One more race of the family at `length`; None if it could not be decided."""
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
