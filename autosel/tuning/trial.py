"""Prove and race one candidate exactly as `tune` does, but record no result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from autosel.candidates import registry
from autosel.candidates.base import Candidate, support_of
from autosel.ledger.describe import shape
from autosel.models.workloads import Named
from autosel.native.compile import compile_source
from autosel.parity.check import INPUTS, check
from autosel.parity.session import CALL_S
from autosel.race.contest import Contest
from autosel.race.judge import judge
from autosel.race.plan import SAMPLE_NS, margin
from autosel.race.run import Disqualified, RaceTerms, Tick, run
from autosel.race.worker import Workers
from autosel.tuning.contend import TIME_CLASSES, contest_of, refuse_without_memory, with_roofline
from autosel.tuning.job import Job, TuneListener
from autosel.tuning.prove import proof_of
from autosel.tuning.shortlist import way_of
from autosel.values import Accepted, Failed, Fingerprint, NativeRecipe, Parity, Race, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Result at one workload. There is no race if parity failed or the candidate does not support the workload."""

    named: Named
    parity: Parity | None
    race: Race | None = None
    verdict: Verdict | None = None
    reason: str = ""


def try_candidate(
    candidate: Candidate,
    named: Sequence[Named],
    fp: Fingerprint,
    listener: TuneListener,
    seed: int | None = None,
    *,
    device: str = "cpu",
    inputs: str = INPUTS,
    call_deadline_s: float = CALL_S,
) -> Iterator[Tried]:
    """Prove and race one candidate against the baseline at each workload on `device`, with its fingerprint `fp`.

    `inputs`: text from which the proof's inputs are drawn. `call_deadline_s`: timeout of one call in a proof.

    Raises BuildError if the candidate does not compile, UsageError without enough memory.
    """
    contests: list[tuple[Named, Contest]] = []
    for n in named:
        support = support_of(candidate, n.workload, fp)
        if isinstance(support, Accepted):
            contests.append((n, _contest(candidate, n, fp)))
        else:
            yield Tried(named=n, parity=None, reason=support.reason)
    refuse_without_memory([contest for _, contest in contests], device)
    entered: dict[str, Tried] = {}
    ready: list[Contest] = []
    for n, contest in contests:
        way = way_of(candidate, n.workload, fp)
        if isinstance(way.recipe, NativeRecipe):
            listener.stage("build", way.recipe.source, 0, 1)
            compile_source(way.recipe.source, way.recipe.flags)
        listener.stage("parity", candidate.name, 0, 1)
        parity = check(proof_of(way, n.workload), fp=fp, inputs=inputs, call_deadline_s=call_deadline_s, device=device)
        if isinstance(parity, Failed):
            yield Tried(named=n, parity=parity, reason=parity.reason)
        else:
            entered[n.workload.key] = Tried(named=n, parity=parity)
            ready.append(contest)
    yield from _race(ready, entered, fp, listener, Random(seed), device)


def _contest(candidate: Candidate, n: Named, fp: Fingerprint) -> Contest:
    way, base = way_of(candidate, n.workload, fp), way_of(registry.baseline(n.workload.op), n.workload, fp)
    margins = {kind: margin(0, 0, SAMPLE_NS) for kind in TIME_CLASSES}
    return contest_of(Job(named=n, mode="", baseline=base, incumbent=base, ways=[way]), fp, margins)


def _race(
    contests: Sequence[Contest],
    entered: Mapping[str, Tried],
    fp: Fingerprint,
    listener: TuneListener,
    rng: Random,
    device: str,
) -> Iterator[Tried]:
    def tell(tick: Tick) -> None:
        w = tick.contest.workload
        listener.stage(tick.stage, f"{tick.pairs} pairs  {w.op} {shape(w)}", tick.done, tick.total)

    fallen: dict[str, str] = {}
    workers = Workers(threads=fp.cpus, rng=rng, device=device)
    for found in run(contests, RaceTerms(rng=rng, progress=tell), workers):
        if isinstance(found, Disqualified):
            fallen[found.contest.workload.key] = f"{found.check}: {found.reason}"
            continue
        contest, race = found
        key, verdict = contest.workload.key, with_roofline(judge(race), contest.workload)
        yield replace(entered[key], race=race, verdict=verdict, reason=fallen.get(key, ""))
