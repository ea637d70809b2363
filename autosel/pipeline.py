"""The story of tuning: fingerprint, knobs, candidates, parity, race, verdict, decision.

`tune` is the one entry the CLI, the daemon and a fleet worker share. Each step takes values and returns values; the
ledger is the one place that writes, and what it acknowledged survives a kill: the next tune starts from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from autosel import fingerprint, ops
from autosel.candidates import arms, registry
from autosel.candidates.base import Candidate
from autosel.candidates.registry import Effort
from autosel.errors import BuildError, UsageError
from autosel.ledger.key import LengthRange, budget_key, current_mode
from autosel.ledger.store import Ledger
from autosel.models.workloads import Named
from autosel.native.compile import compile_source, source_digest
from autosel.parity.check import Proof, check_all
from autosel.race.contest import Contest, Entrant
from autosel.race.judge import judge
from autosel.race.plan import SAMPLE_NS, Margin, TimeClass, margin
from autosel.race.run import Disqualified, Terms, Tick
from autosel.race.run import run as run_races
from autosel.values import (
    Accepted,
    Arm,
    Decision,
    Failed,
    Fingerprint,
    Knobs,
    NativeRecipe,
    Parity,
    Passed,
    Race,
    Recipe,
    Verdict,
    Workload,
    digest,
)

log = logging.getLogger(__name__)


# --- what comes in and what goes out ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to tune. `budget_s` 0: as long as it needs. `seed` makes the draw of operands and coins repeatable."""

    workloads: tuple[Named, ...]
    effort: Effort = "quick"
    device: str = "cpu"
    budget_s: float = 0.0
    seed: int | None = None
    force: bool = False  # measure again what is settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A candidate that does not race, or fell: `stage` is eligible, build, parity or race."""

    workload: Workload
    candidate: str
    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    fingerprint: Fingerprint
    decisions: tuple[Decision, ...]
    measured: int  # of these, decided now; the others were settled before
    rejected: tuple[Rejection, ...]
    undecided: tuple[Named, ...]
    seconds: float
    parities: Mapping[str, Parity] = field(default_factory=dict)


class Listener(Protocol):
    """Who wants to know how it goes."""

    def stage(self, name: str, detail: str, done: int, total: int) -> None: ...

    def decided(self, decision: Decision, settled_before: bool) -> None: ...

    def rejected(self, rejection: Rejection) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A candidate at a workload, ready to be built: its knobs, its recipe, and the arm it would be."""

    candidate: Candidate
    knobs: Knobs
    recipe: Recipe
    build_digest: str
    arm: Arm


@dataclass(slots=True, kw_only=True)
class Job:
    """One workload on its way to a decision."""

    named: Named
    mode: str
    baseline: Way
    ways: list[Way]  # challengers, the incumbent among them if it is not the baseline
    incumbent: Way
    settled: tuple[Decision, ...] = ()
    parities: list[tuple[Arm, Parity]] = field(default_factory=list)
    length_range: LengthRange = None

    @property
    def workload(self) -> Workload:
        return self.named.workload


# --- the story -------------------------------------------------------------------------------------------------------


def tune(
    request: Request, ledger: Ledger, listener: Listener, *, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Decide every workload of the request, with evidence; settled ones are not measured again."""
    started = clock()
    listener.stage("fingerprint", request.device, 0, 1)
    fp = fingerprint.take(request.device)
    report = _Tally(fp, listener)
    with ledger.lock(fp.hw_id) as strikes:
        for strike in strikes:
            log.warning("%s was running when an earlier tune died", strike.arm.candidate)
        jobs = [shortlist(named, fp, request, ledger, report) for named in request.workloads]
        todo = [job for job in jobs if not job.settled]
        for job in jobs:
            report.settled(job)
        todo = build_all(todo, report)
        prove_all(todo, fp, ledger, report)
        terms = Terms(
            threads=threads(fp),
            rng=Random(request.seed),
            clock=clock,
            deadline=started + request.budget_s if request.budget_s else float("inf"),
        )
        for job, found in race_all(todo, fp, ledger, report, terms):
            verdict = judge(found) if found else None
            decision = decide(job, fp, found, verdict, ledger)
            report.decided(job, decision)
    return report.finish(clock() - started)


# --- candidates and knobs --------------------------------------------------------------------------------------------


def shortlist(named: Named, fp: Fingerprint, request: Request, ledger: Ledger, report: _Tally) -> Job:
    """Who may race at this workload, and what is already known about it."""
    w = named.workload
    held = ledger.quarantined(fp.hw_id, w.op)
    ways: list[Way] = []
    for candidate, support in registry.eligible(w, fp, request.effort):
        if not isinstance(support, Accepted):
            report.rejected(w, candidate.name, "eligible", support.reason)
            continue
        try:
            way = way_of(candidate, w, fp)
        except BuildError as error:
            report.rejected(w, candidate.name, "build", error.what)
            continue
        quarantine = held.get(way.build_digest) or held.get(way.arm.digest)
        if quarantine is not None:
            report.rejected(w, candidate.name, "eligible", f"in quarantine: {quarantine.reason}")
            continue
        ways.append(way)
    base_name = registry.baseline(w.op).name
    baseline = next((way for way in ways if way.candidate.name == base_name), None)
    if baseline is None:
        raise UsageError(f"the baseline {base_name} cannot run {w.key}", why="without a baseline nothing can be proven")
    mode = current_mode()
    challengers = [x for x in ways if x is not baseline]
    job = Job(named=named, mode=mode, baseline=baseline, incumbent=baseline, ways=challengers)
    if not request.force:
        job.settled = ledger.known_rows(fp.hw_id, w.bucket, mode, [x.arm.digest for x in ways])
    job.incumbent = _incumbent(job, fp, ledger)
    return job


def way_of(candidate: Candidate, w: Workload, fp: Fingerprint) -> Way:
    """Derive the knobs and name the arm, without building. Raises BuildError if there is nothing to build with."""
    knobs = candidate.knobs(w, fp)
    recipe = candidate.recipe(w, fp, knobs)
    built = source_digest(recipe.source, recipe.flags) if isinstance(recipe, NativeRecipe) else ""
    arm = arms.arm(candidate, w, fp, built, knobs)
    return Way(candidate=candidate, knobs=knobs, recipe=recipe, build_digest=built or arm.digest, arm=arm)


def _incumbent(job: Job, fp: Fingerprint, ledger: Ledger) -> Way:
    """What serves this bucket now, if it is still the thing it was; else the baseline."""
    for served in ledger.serving_rows(fp.hw_id, job.workload.bucket, job.mode):
        for way in job.ways:
            if way.arm.digest == served.arm.digest and served.state in ("promoted", "kept", "pinned"):
                return way
    return job.baseline


# --- build -----------------------------------------------------------------------------------------------------------


def build_all(jobs: Sequence[Job], report: _Tally) -> list[Job]:
    """Compile every recipe once, two compilers at a time; a way that does not compile leaves with the reason."""
    recipes = {w.build_digest: w.recipe for job in jobs for w in job.ways if isinstance(w.recipe, NativeRecipe)}
    failed: dict[str, str] = {}
    done = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {pool.submit(compile_source, r.source, r.flags): (d, r) for d, r in recipes.items()}
        for future in as_completed(futures):
            built, recipe = futures[future]
            done += 1
            report.stage("build", recipe.source, done, len(recipes))
            try:
                future.result()
            except BuildError as error:
                failed[built] = f"{error.what}: {error.why}"
    for job in jobs:
        for way in [x for x in job.ways if x.build_digest in failed]:
            report.rejected(job.workload, way.candidate.name, "build", failed[way.build_digest])
            job.ways.remove(way)
    return list(jobs)


# --- parity ----------------------------------------------------------------------------------------------------------


def prove_all(jobs: Sequence[Job], fp: Fingerprint, ledger: Ledger, report: _Tally) -> None:
    """Prove each way at each workload it may race at; proofs are stored as they come, and stored ones reused.

    One process a build covers all its workloads. A way that fails leaves, is recorded, and is quarantined where the
    failure was a crash, a hang or a wrong result. The baseline is proven like the rest; if it fails that is reported,
    and it still is what must be beaten.
    """
    groups = _unproven(jobs, fp, ledger, report)
    done = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {pool.submit(_prove, members, fp): members for members in groups.values()}
        for future in as_completed(futures):
            done += 1
            for job, way, parity in future.result():
                ledger.save_parity(fp.hw_id, job.workload, way.arm, parity)
                _take_parity(job, way, parity, report)
            report.stage("parity", futures[future][0][1].candidate.name, done, len(groups))


def _unproven(jobs: Sequence[Job], fp: Fingerprint, ledger: Ledger, report: _Tally) -> dict[str, list[tuple[Job, Way]]]:
    groups: dict[str, list[tuple[Job, Way]]] = {}
    for job in jobs:
        for way in [job.baseline, *job.ways]:
            known = ledger.parity_known(fp.hw_id, way.arm.digest, job.workload)
            if known is not None:
                _take_parity(job, way, known, report)
            else:
                groups.setdefault(_process_of(way), []).append((job, way))
    return groups


def _process_of(way: Way) -> str:
    """A build gets a process of its own; PyTorch's own ways are one build."""
    return way.arm.backend if way.arm.backend in ("TORCH", "INDUCTOR") else way.build_digest


def _prove(members: Sequence[tuple[Job, Way]], fp: Fingerprint) -> list[tuple[Job, Way, Parity]]:
    proofs = [proof_of(way, job.workload) for job, way in members]
    found = check_all(proofs, fp=fp)
    return [(job, way, parity) for (job, way), parity in zip(members, found, strict=True)]


def proof_of(way: Way, w: Workload) -> Proof:
    return Proof(candidate=way.candidate, recipe=way.recipe, digest=way.build_digest, knobs=way.knobs, workload=w)


def _take_parity(job: Job, way: Way, parity: Parity, report: _Tally) -> None:
    job.parities.append((way.arm, parity))
    report.parity(job, way, parity)
    if isinstance(parity, Passed):
        return
    report.rejected(job.workload, way.candidate.name, "parity", f"{parity.check} ({parity.case}): {parity.reason}")
    if way is job.baseline:
        log.warning("the baseline itself fails parity at %s: %s", job.workload.key, parity.reason)
        return
    job.ways.remove(way)
    if way is job.incumbent:
        job.incumbent = job.baseline


# --- race ------------------------------------------------------------------------------------------------------------


def race_all(
    jobs: Sequence[Job],
    fp: Fingerprint,
    ledger: Ledger,
    report: _Tally,
    terms: Terms,
) -> Iterator[tuple[Job, Race | None]]:
    """Race every job that has a challenger; each is yielded as soon as its race is complete."""
    contested = {job.workload.key: job for job in jobs if job.ways}
    for job in jobs:
        if not job.ways:
            yield job, None
    margins = margins_of(fp, ledger)
    contests = [contest_of(job, fp, margins) for job in contested.values()]
    _refuse_without_memory(contests)

    def debit(contest: Contest, candidate: str, allowed: Margin) -> bool:
        return ledger.spend(budget_key(fp.hw_id, contest.workload), allowed.false_promotion_bound, candidate)

    total = 4 * len(contests)
    terms = replace(terms, debit=debit, progress=lambda tick: report.tick(tick, total))
    for found in run_races(contests, terms):
        if isinstance(found, Disqualified):
            job = contested[found.contest.workload.key]
            _disqualify(job, found, fp, ledger, report)
            continue
        contest, finished = found
        crossings = [s.aa_crossed for s in finished.sessions if s.aa_crossed is not None and not s.voided]
        ledger.save_aa(fp.hw_id, finished.time_class, crossings)
        yield contested[contest.workload.key], finished


def threads(fp: Fingerprint) -> int:
    """How many threads every arm may use: all usable cores, for baseline and challengers alike."""
    return int(fp.identity["cpus"])


def margins_of(fp: Fingerprint, ledger: Ledger) -> dict[TimeClass, Margin]:
    classes: tuple[TimeClass, TimeClass] = ("short", "long")
    return {kind: margin(*ledger.aa(fp.hw_id, kind), SAMPLE_NS) for kind in classes}


def contest_of(job: Job, fp: Fingerprint, margins: Mapping[TimeClass, Margin]) -> Contest:
    """The job as the race sees it: entrants, and how often operands must be copied to come cold."""
    return Contest(
        workload=job.workload,
        baseline=_entrant(job.baseline),
        incumbent=_entrant(job.incumbent),
        challengers=tuple(_entrant(way) for way in job.ways if way is not job.incumbent),
        margins=margins,
        llc_bytes=llc_bytes(fp),
    )


def llc_bytes(fp: Fingerprint) -> int:
    """The last-level cache of the whole device: what streamed operands must exceed to come cold."""
    return int(fp.identity["l3_bytes"]) * int(fp.identity.get("l3_domains", 1))


def _entrant(way: Way) -> Entrant:
    return Entrant(
        candidate=way.candidate.name,
        op=way.candidate.op,
        recipe=way.recipe,
        digest=way.build_digest,
        knobs=way.knobs.values,
        writes_out=way.candidate.writes_out,
    )


def _disqualify(job: Job, found: Disqualified, fp: Fingerprint, ledger: Ledger, report: _Tally) -> None:
    way = next(x for x in job.ways if x.candidate.name == found.candidate)
    report.rejected(job.workload, found.candidate, "race", f"{found.check}: {found.reason}")
    job.parities.append((way.arm, Failed(check=found.check, case="while racing", evidence={}, reason=found.reason)))
    ledger.save_parity(fp.hw_id, job.workload, *job.parities[-1])
    ledger.quarantine(way.arm, hw_id=fp.hw_id, op=job.workload.op, cause=found.check, reason=found.reason)


def _refuse_without_memory(contests: Sequence[Contest]) -> None:
    """Operands live once in shared memory and once more, in copies, in the process that races."""
    import psutil

    if not contests:
        return
    sizes = {c.workload.key: c.op.bytes_moved(c.workload) for c in contests}
    private = max(size + 4 * c.llc_bytes for c, size in zip(contests, sizes.values(), strict=True))
    need, free = sum(sizes.values()) + private + (1 << 30), psutil.virtual_memory().available
    if need > free:
        worst = max(sizes, key=lambda key: sizes[key])
        raise UsageError(
            f"racing these workloads takes {need / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free",
            why=f"the largest is {worst}: {sizes[worst] / 2**30:.1f} GiB",
            todo="leave it out with --op, or use a smaller model, batch or context",
        )


# --- one candidate, on trial ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What `try_candidate` found at one workload; no race where parity failed or the candidate refused."""

    named: Named
    parity: Parity | None
    race: Race | None = None
    verdict: Verdict | None = None
    reason: str = ""


def try_candidate(
    candidate: Candidate, named: Sequence[Named], fp: Fingerprint, listener: Listener, seed: int | None = None
) -> Iterator[Tried]:
    """Prove and race one candidate against the baseline, exactly as `tune` would; nothing is recorded.

    Raises BuildError if it does not compile.
    """
    contests: dict[str, tuple[Named, Parity, Contest]] = {}
    margins: dict[TimeClass, Margin] = {kind: margin(0, 0, SAMPLE_NS) for kind in ("short", "long")}
    for n in named:
        support = candidate.supports(n.workload, fp)
        if not isinstance(support, Accepted):
            yield Tried(named=n, parity=None, reason=support.reason)
            continue
        way, base = way_of(candidate, n.workload, fp), way_of(registry.baseline(n.workload.op), n.workload, fp)
        listener.stage("build", candidate.name, 0, 1)
        if isinstance(way.recipe, NativeRecipe):
            compile_source(way.recipe.source, way.recipe.flags)
        listener.stage("parity", candidate.name, 0, 1)
        (parity,) = check_all([proof_of(way, n.workload)], fp=fp)
        if isinstance(parity, Failed):
            yield Tried(named=n, parity=parity, reason=parity.reason)
            continue
        job = Job(named=n, mode="", baseline=base, incumbent=base, ways=[way])
        contests[n.workload.key] = (n, parity, contest_of(job, fp, margins))
    yield from _race_tried(contests, fp, listener, seed)


def _race_tried(
    contests: Mapping[str, tuple[Named, Parity, Contest]], fp: Fingerprint, listener: Listener, seed: int | None
) -> Iterator[Tried]:
    def tell(tick: Tick) -> None:
        listener.stage(tick.stage, f"{tick.contest.workload.key} {tick.pairs} pairs", 0, len(contests))

    fallen: dict[str, str] = {}
    terms = Terms(threads=threads(fp), rng=Random(seed), progress=tell)
    for found in run_races([c for _, _, c in contests.values()], terms):
        if isinstance(found, Disqualified):
            fallen[found.contest.workload.key] = f"{found.check}: {found.reason}"
            continue
        entered, raced = found
        n, parity, _ = contests[entered.workload.key]
        verdict = with_roofline(judge(raced), entered.workload)
        yield Tried(named=n, parity=parity, race=raced, verdict=verdict, reason=fallen.get(n.workload.key, ""))


# --- decide ----------------------------------------------------------------------------------------------------------


def decide(job: Job, fp: Fingerprint, found: Race | None, verdict: Verdict | None, ledger: Ledger) -> Decision:
    """Make the verdict durable. A winner by race is promoted; otherwise the incumbent is kept, and the reason said."""
    winner, reason = job.incumbent, "no other candidate can run this here"
    if verdict is not None:
        verdict = with_roofline(verdict, job.workload)
        winner = next(x for x in [job.baseline, *job.ways] if x.candidate.name == verdict.winner)
        reason = verdict.reason
    key = {"hw": fp.hw_id, "bucket": job.workload.bucket, "mode": job.mode, "race": digest(found) if found else ""}
    if found is None:
        key["arms"] = digest([arm.digest for arm, _ in job.parities])
    return ledger.record(
        fp,
        job.workload,
        verdict=verdict,
        race=found,
        parities=job.parities,
        arm=winner.arm,
        baseline=job.baseline.arm,
        mode=job.mode,
        state="promoted" if verdict is not None and verdict.outcome == "promote" else "kept",
        reason=reason,
        idempotency_key=digest(key),
        length_range=job.length_range,
        entrants=[x.arm.digest for x in job.ways],
    )


def with_roofline(verdict: Verdict, w: Workload) -> Verdict:
    """Fraction of what the read rate of this very race allows; only for workloads that read memory."""
    if not verdict.read_bytes_per_s or verdict.winner not in verdict.timings:
        return verdict
    floor_us = ops.find(w.op).bytes_moved(w) / verdict.read_bytes_per_s * 1e6
    return replace(verdict, roofline=floor_us / verdict.timings[verdict.winner].median_us)


# --- keeping count ---------------------------------------------------------------------------------------------------


class _Tally:
    """What happened so far, told to the listener as it happens."""

    def __init__(self, fp: Fingerprint, listener: Listener) -> None:
        self.fp, self.listener = fp, listener
        self.decisions: list[Decision] = []
        self.rejections: list[Rejection] = []
        self.unsettled: list[Named] = []
        self.measured = 0
        self.parities: dict[str, Parity] = {}

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        self.listener.stage(name, detail, done, total)

    def tick(self, tick: Tick, total: int) -> None:
        detail = f"{tick.contest.workload.op} {tick.contest.workload.shape_text}  {tick.candidate}  {tick.pairs} pairs"
        self.listener.stage(tick.stage, detail, self.measured, total)

    def settled(self, job: Job) -> None:
        for decision in job.settled:
            self.decisions.append(decision)
            self.listener.decided(decision, settled_before=True)

    def decided(self, job: Job, decision: Decision) -> None:
        self.measured += 1
        self.decisions.append(decision)
        if decision.verdict is not None and decision.verdict.outcome == "undecided":
            self.unsettled.append(job.named)
        self.listener.decided(decision, settled_before=False)

    def rejected(self, w: Workload, candidate: str, stage: str, reason: str) -> None:
        rejection = Rejection(workload=w, candidate=candidate, stage=stage, reason=reason)
        self.rejections.append(rejection)
        self.listener.rejected(rejection)

    def parity(self, job: Job, way: Way, parity: Parity) -> None:
        self.parities[f"{way.candidate.name} {job.workload.key}"] = parity

    def finish(self, seconds: float) -> Report:
        return Report(
            fingerprint=self.fp,
            decisions=tuple(self.decisions),
            measured=self.measured,
            rejected=tuple(self.rejections),
            undecided=tuple(self.unsettled),
            seconds=seconds,
            parities=self.parities,
        )
