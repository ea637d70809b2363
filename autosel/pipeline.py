"""The story of tuning: fingerprint, knobs, candidates, parity, race, verdict, decision.

The CLI, the daemon and a fleet's workers all call `tune`. Each step takes values and returns values. Only the ledger
writes, and what it acknowledged survives a kill: the next tune continues from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import torch

from autosel import fingerprint
from autosel.ledger.store import Ledger
from autosel.tuning.contend import contend, contests, refuse_without_memory
from autosel.tuning.crossover import lowest_ends, may_split, split_buckets
from autosel.tuning.decide import decide
from autosel.tuning.job import Rejection, Report, Request, TuneEvents, TuneListener, Tuning
from autosel.tuning.prove import prove_all
from autosel.tuning.renew import serve_meanwhile
from autosel.tuning.shortlist import shortlist
from autosel.tuning.trial import Tried, try_candidate

log = logging.getLogger(__name__)

__all__ = ["Rejection", "Report", "Request", "Tried", "TuneListener", "try_candidate", "tune", "tune_at"]


def tune(
    request: Request, ledger: Ledger, listener: TuneListener, *, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Decide every workload of the request, with evidence; settled ones are not measured again.

    One tune per device at a time: raises LedgerError at once if another one holds it.
    """
    started = clock()
    listener.stage("fingerprint", request.device, 0, 1)
    fp = fingerprint.at(fingerprint.take(request.device), torch.get_num_threads())
    tuning = Tuning(
        fp=fp,
        ledger=ledger,
        request=request,
        tally=TuneEvents(listener),
        rng=Random(request.seed),
        clock=clock,
        deadline=started + request.budget_s if request.budget_s else float("inf"),
    )
    with ledger.lock(fp.hw_id, fingerprint.unit(request.device)) as strikes:
        for strike in strikes:
            log.warning("%s was running when an earlier tune died", strike.arm.candidate)
        serve_meanwhile(tuning)
        jobs = [shortlist(tuning, named) for named in request.workloads]
        for job in jobs:
            tuning.tally.settled(job)
        todo = [job for job in jobs if not job.settled]
        todo += [shortlist(tuning, end, probe=True) for end in lowest_ends([job.named for job in todo])]
        refuse_without_memory(contests(tuning, todo), request.device)
        prove_all(tuning, todo)
        ready = [job for job in todo if not job.late]
        for job in contend(tuning, ready):
            if not job.probe and not may_split(job):
                tuning.tally.decided(job, decide(tuning, job))
        for job in todo:
            if job.late and not job.probe:
                tuning.tally.late(job)
        for job, lengths, workload in split_buckets(tuning, [*jobs, *ready]):
            tuning.tally.decided(job, decide(tuning, job, lengths=lengths, workload=workload))
    return _report(tuning, clock() - started)


def tune_at(
    request: Request,
    counts: Sequence[int],
    ledger: Ledger,
    listener: TuneListener,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Decide the workloads for processes with each of these numbers of threads; 0 means this process's number.

    The budget is for all of them together.
    """
    started = clock()
    found: list[Report] = []
    for count in counts:
        left = max(1e-3, request.budget_s - (clock() - started)) if request.budget_s else 0.0
        with _torch_threads(count):
            found.append(tune(replace(request, budget_s=left), ledger, listener, clock=clock))
    return Report(
        fingerprint=found[-1].fingerprint,
        decisions=tuple(d for r in found for d in r.decisions),
        measured=sum(r.measured for r in found),
        rejected=tuple(dict.fromkeys(one for r in found for one in r.rejected)),
        undecided=tuple(n for r in found for n in r.undecided),
        seconds=clock() - started,
        labels=found[-1].labels,
    )


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(tuning: Tuning, seconds: float) -> Report:
    tally = tuning.tally
    return Report(
        fingerprint=tuning.fp,
        decisions=tuple(tally.decisions),
        measured=tally.measured,
        rejected=tuple(tally.rejections),
        undecided=tuple(tally.undecided),
        seconds=seconds,
        labels={n.workload.key: n.label for n in tuning.request.workloads},
    )
